"""Error messages of the page and its automatic recovery."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import TABLE
from tests.support.browser import GONE, OF_A_STATUS, Reader
from tests.support.gateway_fakes import Behind
from tests.support.tenants import ACME, BOLT, credential_of, write_credentials

TEXT = "Nothing of note is written here, and nothing will be.\namber-12 = 4711\njade-7 = 0815\n" * 20
QUESTION, ANSWER = "What is the value of amber-12?", "amber-12 is 4711"


@pytest.fixture
def own(browser: Any, tmp_path: Path) -> Iterator[tuple[Reader, Behind]]:
    """A separate service for fault injection, and a page with the document `notes` open."""
    with Behind("--data-dir", str(tmp_path / "data")) as behind, Reader(browser, behind.url) as reader:
        behind.ingest("notes", TEXT)
        reader.page.get_by_role("link", name="notes").click()
        reader.page.locator("#question").wait_for()
        yield reader, behind


@pytest.mark.parametrize("whom", ["service", "gateway"])
def test_page_reconnects_after_the_service_restarts(own: tuple[Reader, Behind], whom: str):
    reader, behind = own
    page = reader.page
    assert reader.ask(QUESTION) == ANSWER
    getattr(behind, f"lose_{whom}")()
    page.get_by_text("not connected").wait_for()
    page.get_by_text(re.compile("The service cannot be reached")).first.wait_for()
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Ask again").wait_for()
    reader.add(("More.txt", TEXT))
    page.get_by_text("The upload continues automatically").wait_for()
    getattr(behind, f"find_{whom}")()
    page.get_by_text("connected", exact=True).wait_for()
    page.get_by_role("link", name="More").wait_for()
    page.get_by_role("button", name="Ask again").click()
    page.locator(".foot").nth(1).wait_for()
    assert page.locator(".answer").last.inner_text().strip() == ANSWER
    assert set(behind.tokens()) == {"notes", "more"}
    reader.audit(OF_A_STATUS.format(50), GONE)


def test_lost_rank_and_its_recovery_are_shown(own: tuple[Reader, Behind]):
    reader, behind = own
    behind.ingest("long", TEXT * 40)
    behind.kill_rank(1)
    places = reader.page.get_by_role("complementary", name="Memory")
    places.get_by_text("Its part of the documents is being restored").wait_for()
    places.get_by_text(re.compile(r"[\d,]+ of [\d,]+ tokens restored")).wait_for()
    places.get_by_text("One rank was lost").click()
    places.get_by_text(re.compile(r"Rank 1 on .* A replacement is running\.")).wait_for()
    assert reader.ask(QUESTION) == ANSWER
    assert places.get_by_role("listitem").filter(has_text=re.compile(r"^Rank [01]")).count() == 2
    reader.audit()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """A service that requires credentials."""
    credentials = write_credentials(tmp_path_factory.mktemp("guarded"))
    with Behind("--credentials", str(credentials), credential=credential_of(ACME)) as behind:
        yield behind


def test_page_asks_for_a_credential_and_rejects_a_wrong_one(browser: Any, guarded: Behind):
    with Reader(browser, guarded.url) as reader:
        page = reader.page
        dialog = page.get_by_role("dialog", name="Credential required")
        dialog.get_by_label("Credential", exact=True).fill("secret-of-nobody")
        page.keyboard.press("Enter")
        dialog.get_by_text("The service refused this credential.").wait_for()
        dialog.get_by_label("Credential", exact=True).fill(credential_of(ACME))
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Add your first document").wait_for()
        reader.add(("notes.txt", TEXT))
        page.locator("#question").wait_for()
        assert reader.ask(QUESTION) == ANSWER
        page.get_by_role("button", name="Change credential").click()
        page.get_by_label("Credential", exact=True).fill(credential_of(BOLT))
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="notes does not exist").wait_for()
        retained = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert "secret-of" not in retained + page.content()
        page.reload()
        page.get_by_role("dialog", name="Credential required").wait_for()
        reader.audit(OF_A_STATUS.format(401))


def test_dismissed_credential_prompt_is_reported_and_can_be_reopened(browser: Any, guarded: Behind):
    with Reader(browser, guarded.url) as reader:
        page = reader.page
        page.get_by_role("dialog", name="Credential required").wait_for()
        page.keyboard.press("Escape")
        page.get_by_text("The service requires a credential.").wait_for()
        page.get_by_role("button", name="Enter a credential").click()
        page.get_by_label("Credential", exact=True).fill("secret-of-nobody")
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("The service refused this credential.").wait_for()
        page.get_by_role("button", name="Not now").click()
        page.get_by_role("button", name="Enter a credential").click()
        page.get_by_label("Credential", exact=True).fill(credential_of(ACME))
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("connected", exact=True).wait_for()
        page.get_by_role("heading", name=re.compile("Add your first document|Choose a document")).wait_for()
        reader.audit(OF_A_STATUS.format(401))


@pytest.mark.parametrize(
    ("status", "code", "wait", "message"),
    [
        (400, "", None, "The request is invalid: why."),
        (404, "context_not_found", None, "Add its file again"),
        (409, "already_exists", None, "Choose another one, or append the file"),
        (410, "", None, "Add the file again."),
        (415, "", None, "This file cannot be read: why"),
        (429, "", "7", "Try again in 7 s."),
        (429, "insufficient_quota", None, "Delete documents, or wait"),
        (503, "", "1", "The service is not available: why. Try again in a moment."),
        (503, "gateway_busy", "7", "Why. Try again in 7 s."),
        (503, "gateway_busy", None, "Why. Try again in a moment."),
        (504, "", None, "Try again when the load is lower."),
        (500, "", None, "The service reports: why."),
    ],
)
def test_errors_are_sentences_with_advice(reader: Reader, status: int, code: str, wait: str | None, message: str):
    headers = {} if wait is None else {"retry-after": wait}
    script = """async ([status, code, headers]) => {
      const { Refusal, sentence } = await import('/page/errors.js');
      return sentence(new Refusal(status, { message: 'why', code }, new Headers(headers)));
    }"""
    assert message in reader.page.evaluate(script, [status, code, headers])


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.error.__name__)
def test_error_in_a_stream_reads_like_an_error_before_it(reader: Reader, row: Any):
    script = """async ([status, kind, code]) => {
      const { Refusal, refusalOf, sentence } = await import('/page/errors.js');
      const error = { message: 'why', type: kind, code };
      const headers = new Headers(code === 'rate_limit_exceeded' ? { 'retry-after': '1' } : {});
      return [sentence(refusalOf(error)), sentence(new Refusal(status, error, headers))];
    }"""
    [event, answer] = reader.page.evaluate(script, [row.status, row.kind, row.code])
    assert event == answer


def test_answer_that_fails_midway_keeps_its_text_and_shows_the_reason(reader: Reader, behind: Behind):
    behind.ingest("notes", TEXT)
    page = reader.page
    page.get_by_role("link", name="notes").click()
    chunk = {"choices": [{"index": 0, "delta": {"content": "amber-12 is"}, "finish_reason": None}]}
    error = {"message": "the ranks that held it are gone", "type": "invalid_request_error", "code": "context_lost"}
    body = f"data: {json.dumps(chunk)}\n\nevent: error\ndata: {json.dumps({'error': error})}\n\n"
    page.route("**/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    output = page.get_by_role("alert").inner_text()
    assert output.startswith("The stored document is damaged: the ranks that held it are gone. Add the file again.")
    assert page.locator(".answer").inner_text() == "amber-12 is"
    page.unroute("**/chat/completions")
    page.get_by_role("button", name="Ask again").click()
    page.locator(".foot").wait_for()
    assert page.locator(".answer").inner_text().strip() == ANSWER
    reader.audit()


def test_out_of_capacity_error_shows_only_the_advice_of_the_page(reader: Reader):
    script = """async (message) => {
      const { Refusal, sentence } = await import('/page/errors.js');
      return sentence(new Refusal(429, { message, code: 'insufficient_quota' }));
    }"""
    message = "pool: 4,096 tokens are needed, and contexts use too many of 2,048; delete a context"
    assert reader.page.evaluate(script, message) == (
        "There is not enough space: 4,096 tokens are needed, and contexts use too many of 2,048."
        " Delete documents, or wait until some expire."
    )
