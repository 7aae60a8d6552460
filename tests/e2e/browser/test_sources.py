"""Sources on the page: numbered marks under an answer, which open the text of the document."""

import re
from typing import Any

import pytest

from tests.e2e.browser.test_accessibility import CHECK, CONTRAST
from tests.support.browser import OF_A_STATUS, Reader
from tests.support.document_samples import pdf
from tests.support.gateway_fakes import Behind

FILLER = "Nothing of note is written here, and nothing will be. Ü 世 🍏\n"
MARKUP = "<img src=x onerror=alert(1)> <b>bold</b> [link](https://evil.example)\n"
BOOK = FILLER * 30 + MARKUP + "The access code for amber falcon is 4711.\n" + MARKUP + FILLER * 30
FACT_LINE = BOOK.split("amber")[0].count("\n") + 1
QUESTION = "What is the access code for amber falcon?"


@pytest.fixture
def book(behind: Behind) -> Behind:
    behind.ingest("notes", BOOK)
    return behind


def ask_with_sources(reader: Reader, title: str = "notes") -> Any:
    """The marks under the answer about the document with this title."""
    page = reader.page
    page.get_by_role("link", name=title, exact=False).click()
    page.get_by_role("heading", name=title, exact=True).wait_for()
    page.get_by_role("switch", name="Show sources").check()
    assert "4711" in reader.ask(QUESTION)
    marks = page.get_by_role("group", name="Sources of this answer").get_by_role("button")
    marks.first.wait_for()
    return marks


def requests_of(reader: Reader) -> list[Any]:
    return [each.post_data_json for each in reader.requests if each.url.endswith("/chat/completions")]


def test_mark_opens_the_highlighted_text_of_the_document(reader: Reader, book: Behind):
    page = reader.page
    marks = ask_with_sources(reader)
    texts = []
    for number in range(marks.count()):
        mark = marks.nth(number)
        assert mark.get_attribute("aria-label").startswith(f"Source {number + 1}: line")
        mark.focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name=f"Source {number + 1}: line")
        highlighted = dialog.locator("mark")
        highlighted.wait_for()
        texts.append(highlighted.inner_text())
        shown = dialog.get_by_role("region", name="Text of the document").inner_text()
        assert shown in BOOK and len(shown) > len(texts[-1])
        assert dialog.locator(".passage *:not(mark)").count() == 0, "text of documents makes no elements"
        page.keyboard.press("Escape")
        dialog.wait_for(state="detached")
        assert mark.evaluate("(each) => each === document.activeElement")
    assert any("amber falcon is 4711" in text for text in texts)
    reader.audit()


def test_sources_of_uploaded_files_are_named_by_file_and_place(reader: Reader, behind: Behind):
    page = reader.page
    pages = ["Nothing of note is written here. " * 5] * 3
    files = [
        ("Plain Notes.txt", BOOK.encode()),
        ("report.pdf", pdf([*pages, "The access code for amber falcon is 4711.", *pages])),
    ]
    for name, content in files:
        page.get_by_role("button", name="Add documents…").first.wait_for()
        page.locator("input[type=file]").first.set_input_files(
            [{"name": name, "mimeType": "application/octet-stream", "buffer": content}]
        )
        page.get_by_role("dialog").get_by_role("button", name="Upload").click()
    for title, label in (("Plain Notes", r"Plain Notes\.txt:\d+-\d+"), ("report", "report\\.pdf, page 4")):
        marks = ask_with_sources(reader, title)
        assert any(re.search(label, mark.get_attribute("aria-label")) for mark in marks.all())
    reader.audit()


def test_text_around_a_source_can_be_extended(reader: Reader, book: Behind):
    page = reader.page
    ask_with_sources(reader).first.click()
    region = page.get_by_role("region", name="Text of the document")
    page.locator("mark").wait_for()
    marked = page.locator("mark").inner_text()
    for name in ("Earlier text", "Later text"):
        num_units = region.evaluate("(each) => each.innerText.length")
        page.get_by_role("button", name=name).click()
        page.wait_for_function("(size) => document.querySelector('.passage').innerText.length > size", arg=num_units)
        assert region.inner_text() in BOOK and page.locator("mark").inner_text() == marked
    page.get_by_role("button", name="Close").click()
    page.get_by_role("dialog").wait_for(state="detached")
    reader.audit()


def test_sources_are_only_requested_when_the_switch_is_on_and_survive_a_reload(reader: Reader, book: Behind):
    page = reader.page
    marks = ask_with_sources(reader)
    names = [mark.get_attribute("aria-label") for mark in marks.all()]
    page.reload()
    marks.first.wait_for()
    assert [mark.get_attribute("aria-label") for mark in marks.all()] == names
    assert "amber" not in page.evaluate("JSON.parse(localStorage['longleaf.conversation.notes']).turns[0].sources + ''")
    switch = page.get_by_role("switch", name="Show sources")
    assert switch.is_checked()
    switch.uncheck()
    reader.ask(QUESTION)
    assert page.get_by_role("group", name="Sources of this answer").count() == 1
    marks.first.click()
    page.locator("mark").wait_for()
    assert [each.get("sources") for each in requests_of(reader)] == [{"count": 5}, None]
    reader.audit()


def test_source_of_a_lost_document_shows_an_error(reader: Reader, book: Behind):
    page = reader.page
    marks = ask_with_sources(reader)
    page.route("**/text?*", lambda route: route.fulfill(status=503, body='{"error": {"message": "away"}}', headers={}))
    marks.first.click()
    page.get_by_role("dialog").get_by_role("alert").get_by_text("The service is not available: away.").wait_for()
    reader.audit(OF_A_STATUS.format(503))


@pytest.mark.parametrize(("width", "scheme"), [(320, "dark"), (390, "light"), (1280, "dark")])
def test_sources_are_labelled_and_fit_at_every_width(browser: Any, book: Behind, width: int, scheme: str):
    options = {"viewport": {"width": width, "height": 700}, "color_scheme": scheme, "reduced_motion": "reduce"}
    with Reader(browser, book.url, **options) as reader:
        marks = ask_with_sources(reader)

        def check() -> None:
            assert reader.page.evaluate(CHECK) == []
            assert reader.page.evaluate(CONTRAST) == []
            assert reader.fits()

        check()
        marks.first.click()
        reader.page.locator("mark").wait_for()
        check()
        assert reader.page.locator("mark").evaluate(
            "(mark) => { const [own, outer] = [mark, mark.parentElement].map((each) => each.getBoundingClientRect());"
            " return own.bottom > outer.top && own.top < outer.bottom; }"
        )
        reader.audit()
