"""Actions on documents in the list."""

from datetime import datetime, timedelta

import pytest

from tests.support.browser import OF_A_STATUS, Reader
from tests.support.gateway_fakes import Behind

TEXT = "Nothing of note is written here, and nothing will be.\namber-12 = 4711\njade-7 = 0815\n" * 5


@pytest.fixture
def opened(reader: Reader, behind: Behind) -> Reader:
    """With the document `notes` open."""
    behind.ingest("notes", TEXT)
    reader.page.get_by_role("link", name="notes").click()
    reader.page.get_by_role("heading", name="notes", exact=True).wait_for()
    return reader


def test_document_is_pinned_and_unpinned(opened: Reader, behind: Behind):
    page = opened.page
    page.get_by_role("button", name="Pin", exact=True).click()
    page.get_by_role("link", name="notes").filter(has_text="pinned").wait_for()
    assert behind.contexts()[0].is_pinned
    page.get_by_role("button", name="Pinned", pressed=True).click()
    page.get_by_role("button", name="Pin", exact=True, pressed=False).wait_for()
    assert not behind.contexts()[0].is_pinned
    opened.audit()


def test_document_expiry_is_set_and_cleared(opened: Reader, behind: Behind):
    page = opened.page
    page.get_by_label("Expires").select_option("In a day")
    page.get_by_role("link", name="notes").filter(has_text="expires in 24 h").wait_for()
    expires = behind.contexts()[0].expires
    assert expires is not None
    assert abs(datetime.fromtimestamp(expires) - datetime.now() - timedelta(days=1)) < timedelta(minutes=5)
    page.get_by_label("Expires").select_option("Never")
    page.get_by_role("article").get_by_text("expires in").wait_for(state="detached")
    assert behind.contexts()[0].expires is None
    opened.audit()


def test_part_of_a_document_is_forked(opened: Reader, behind: Behind):
    page = opened.page
    page.get_by_role("button", name="Fork…").click()
    page.get_by_label("Name").fill("notes")
    page.get_by_text("notes is taken.").wait_for()
    page.get_by_label("Name").fill("beginning")
    page.get_by_label("Tokens from the beginning").fill("0")
    assert page.get_by_role("button", name="Fork", exact=True).is_disabled()
    page.get_by_label("Tokens from the beginning").fill(str(len(TEXT) // 5))
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="beginning", exact=True).wait_for()
    assert behind.tokens() == {"notes": len(TEXT) + 1, "beginning": len(TEXT) // 5}
    assert opened.ask("What is the value of amber-12?").startswith("amber-12 is 4711")
    opened.audit()


def test_document_is_deleted_after_confirmation(opened: Reader, behind: Behind):
    page = opened.page
    page.get_by_role("button", name="Delete…").click()
    page.keyboard.press("Enter")  # focus an element without side effects
    page.get_by_role("dialog").wait_for(state="detached")
    assert len(behind.contexts()) == 1
    page.get_by_role("button", name="Delete…").click()
    page.get_by_role("button", name="Delete it").click()
    page.get_by_role("heading", name="Add your first document").wait_for()
    assert behind.contexts() == []
    opened.audit()


def test_changes_by_other_clients_appear_without_reload(opened: Reader, behind: Behind):
    page = opened.page
    behind.ingest("another", TEXT)
    page.get_by_role("link", name="another").wait_for()
    behind.delete("notes")
    page.get_by_role("heading", name="notes does not exist").wait_for()
    opened.audit()


def test_question_about_a_deleted_document_shows_advice(opened: Reader, behind: Behind):
    page = opened.page
    with opened.delayed("**/v1/contexts"):
        behind.delete("notes")
        page.locator("#question").fill("What is the value of amber-12?")
        page.keyboard.press("Enter")
        page.get_by_text("This document does not exist.").wait_for()
    opened.audit(OF_A_STATUS.format(404))


def test_placement_map_shows_the_rank_of_each_part(opened: Reader, behind: Behind):
    places = opened.page.get_by_role("complementary", name="Memory")
    [context] = behind.contexts()
    for share in context.shares:
        row = places.locator("li", has_text=f"Rank {share.rank}")
        row.filter(has_text=f"{share.tokens} of this document").wait_for()
    opened.audit()
