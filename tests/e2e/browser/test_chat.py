"""Conversations on the page: without a document, saved, with settings, and with Markdown in answers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import OF_A_STATUS, Reader
from tests.support.gateway_fakes import Behind

MARKDOWN = """# Fish

Some **bold**, *italic* and ***both***, `a < b`, snake_case_words and 2 * 3 * 4.
Line two: [a page](https://example.com/x_(y)?a=1&b=2 "title"), https://example.org/a. Not \\*this\\*.

1. one
2. two
   - nested

> quoted

```js
const x = "<b>";
*not emphasis*
```
"""
HOSTILE = """[a](javascript:alert(1)) [b](data:text/html,x) [c](//evil.example) [d](/page/main.js) ![i](x.png)
<img src=x onerror=alert(1)> <script>alert(2)</script> [e](https://user@evil.example/ "x") `<i>`
"""


@pytest.fixture(scope="module")
def chatting(browser: Any) -> Iterator[Behind]:
    """The model's name makes the page treat it as a chat model."""
    with Behind("--model-name", "teller") as behind:
        yield behind


@pytest.fixture
def reader(browser: Any, chatting: Behind) -> Iterator[Reader]:
    chatting.clear()
    with Reader(browser, chatting.url) as reader:
        yield reader


def stream_of(text: str, reason: str = "stop") -> str:
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}},
    ]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answer_with(reader: Reader, text: str, reason: str = "stop") -> None:
    """All further questions get this answer."""
    body = stream_of(text, reason)
    reader.page.unroute("**/chat/completions")
    reader.page.route("**/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def requests_of(reader: Reader) -> list[Any]:
    return [each.post_data_json for each in reader.requests if each.url.endswith("/chat/completions")]


def open_chat(reader: Reader) -> None:
    reader.page.get_by_role("link", name="chat without a document", exact=True).click()
    reader.page.get_by_role("heading", name="Chat", exact=True).wait_for()


def test_conversation_without_a_document_survives_a_reload(reader: Reader):
    page = reader.page
    open_chat(reader)
    answer_with(reader, "I am well.")
    assert reader.ask("How are you?") == "I am well."
    page.reload()
    page.get_by_text("I am well.").wait_for()
    answer_with(reader, "Fine.")
    assert reader.ask("And now?") == "Fine."
    first, second = requests_of(reader)
    assert (first["model"], first["max_tokens"], "temperature" in first) == ("teller", 4096, False)
    assert [(each["role"], each["content"]) for each in second["messages"]] == [
        ("user", "How are you?"),
        ("assistant", "I am well."),
        ("user", "And now?"),
    ]
    page.get_by_role("button", name="New conversation").click()
    page.reload()
    page.locator("#question").wait_for()
    assert page.locator(".question").count() == 0
    assert page.evaluate("localStorage.length") == 0
    reader.audit()


def test_conversation_about_a_document_ends_with_the_document(reader: Reader, chatting: Behind):
    page = reader.page
    chatting.ingest("notes", "amber-12 = 4711\n" * 20)
    page.get_by_role("link", name="notes").click()
    assert reader.ask("What is the value of amber-12?") == "amber-12 is 4711"
    page.reload()
    page.get_by_text("amber-12 is 4711").wait_for()
    chatting.delete("notes")
    page.get_by_role("heading", name="notes does not exist").wait_for()
    chatting.ingest("notes", "amber-12 = 5\n" * 20)
    page.get_by_role("heading", name="notes", exact=True).wait_for()
    page.locator("#question").wait_for()
    assert page.locator(".question").count() == 0
    reader.audit()


def test_answer_that_is_being_written_is_saved_as_stopped(reader: Reader):
    page = reader.page
    open_chat(reader)
    page.evaluate("""() => {
      const line = 'data: {"choices": [{"index": 0, "delta": {"content": "Half an"}, "finish_reason": null}]}\\n\\n';
      const original = fetch;
      globalThis.fetch = async (path, options) => String(path).endsWith('completions')
        ? new Response(new ReadableStream({ start: (stream) => stream.enqueue(new TextEncoder().encode(line)) }))
        : original(path, options);
    }""")
    page.locator("#question").fill("Who?")
    page.keyboard.press("Enter")
    page.get_by_text("Half an").wait_for()
    page.reload()
    page.get_by_text("Half an").wait_for()
    page.get_by_text("Stopped.").wait_for()
    reader.audit()


def test_settings_apply_to_requests_and_survive_a_reload(reader: Reader):
    page = reader.page
    open_chat(reader)
    answer_with(reader, "Yes.")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature, 0 to 2").fill("0.5")
    page.get_by_label("Longest answer, in tokens").fill("99")
    reader.ask("One?")
    page.get_by_label("Temperature, 0 to 2").fill("7")
    page.get_by_text("A marked value is invalid and is not used.").wait_for()
    reader.ask("Two?")
    page.reload()
    page.get_by_text("Settings (changed)").wait_for()
    reader.ask("Three?")
    first, second, third = requests_of(reader)
    assert (first["temperature"], first["max_tokens"]) == (0.5, 99)
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "temperature" not in second and "temperature" not in third
    assert (third["max_tokens"], third["messages"][0]["content"], len(third["messages"])) == (99, "Be brief.", 6)
    reader.audit()


def test_cut_answer_is_marked(reader: Reader):
    open_chat(reader)
    answer_with(reader, "It is", "length")
    reader.ask("What is it?")
    reader.page.get_by_text("The answer was cut off after 7 tokens. Ask for the rest.").wait_for()
    reader.page.reload()
    reader.page.get_by_text("The answer was cut off after 7 tokens. Ask for the rest.").wait_for()
    reader.audit()


def test_markdown_of_answers_is_rendered(reader: Reader):
    page = reader.page
    open_chat(reader)
    answer_with(reader, MARKDOWN)
    reader.ask("Show me.")
    shown = page.locator(".answer")
    assert shown.get_by_role("heading", name="Fish", level=3).count() == 1
    assert shown.locator("strong").all_inner_texts() == ["bold", "both"]
    assert shown.locator("em").all_inner_texts() == ["italic", "both"]
    assert shown.locator("p code").inner_text() == "a < b"
    assert shown.locator("pre").inner_text() == 'const x = "<b>";\n*not emphasis*'
    assert shown.locator("blockquote").inner_text() == "quoted"
    assert shown.locator("ol > li").count() == 2 and shown.locator("ol ul li").inner_text() == "nested"
    assert "snake_case_words and 2 * 3 * 4." in shown.inner_text() and "Not *this*." in shown.inner_text()
    links = shown.locator("a")
    assert [link.get_attribute("href") for link in links.all()] == [
        "https://example.com/x_(y)?a=1&b=2",
        "https://example.org/a",
    ]
    assert {(link.get_attribute("rel"), link.get_attribute("target")) for link in links.all()} == {
        ("noopener noreferrer nofollow", "_blank")
    }
    assert reader.fits()
    reader.audit()


def test_hostile_markdown_makes_no_markup_scripts_or_requests(reader: Reader):
    page = reader.page
    open_chat(reader)
    answer_with(reader, HOSTILE)
    reader.ask("Show me.")
    shown = page.locator(".answer")
    assert [link.get_attribute("href") for link in shown.locator("a").all()] == ["https://user@evil.example/"]
    assert shown.locator("img, script, i, iframe").count() == 0
    for text in ("[a](javascript:alert(1))", "[c](//evil.example)", "<img src=x onerror=alert(1)>", "![i](x.png)"):
        assert text in shown.inner_text()
    reader.audit()


LINES = {
    "emphasis": "*a _b " * 20_000,
    "stars": "*" * 100_000,
    "backticks": " ".join("`" * (1 + i % 40) for i in range(5_000)),
    "brackets": "[" * 100_000,
    "quotes": ">" * 50_000,
    "lists": "- " * 50_000,
    "nested": "\n".join(" " * 2 * i + "- x" for i in range(300)),
    "spaces": "#" + " " * 100_000 + "#",
    "fences": "```\n" * 20_001,
    "addresses": "http://" * 15_000,
}


@pytest.mark.parametrize("name", LINES)
def test_adversarial_markdown_takes_linear_time(reader: Reader, name: str):
    """Quadratic work would exceed the time limit of the page."""
    script = """async (text) => {
      const [{ Markdown }, { html, render }] = [await import('/page/markdown.js'), await import('/page/html.js')];
      const place = document.createElement('div');
      render(html`<${Markdown} text=${text} />`, place);
      return place.textContent.length;
    }"""
    assert reader.page.evaluate(script, LINES[name]) <= len(LINES[name])


def test_saved_conversations_have_limits_and_belong_to_their_credential(reader: Reader):
    script = """async () => {
      const { load, save } = await import('/page/saved_conversations.js');
      const { credential } = await import('/page/credential.js');
      const turn = (answer) => ({ question: 'q', answer, phase: 'done' });
      for (let i = 0; i < 40; i += 1) save(`c${i}`, 1, [turn('a')]);
      const kept = localStorage.length;
      save('long', 1, Array.from({ length: 5 }, (_, i) => turn(String(i).repeat(100_000))));
      const long = load('long', 1).map(({ answer }) => answer[0]).join('');
      for (let i = 0; i < 20; i += 1) save(`big${i}`, 1, [turn('b'.repeat(250_000))]);
      const size = Object.values({ ...localStorage }).reduce((sum, { length }) => sum + length, 0);
      localStorage.setItem('longleaf.conversation.odd', '{"created": 1, "turns": [{"question": 5}, null]}');
      const odd = load('odd', 1).length;
      localStorage.clear();
      credential.give('secret-of-one');
      save('mine', 1, [turn('private')]);
      credential.give('secret-of-two');
      const others = load('mine', 1).length;
      credential.give('secret-of-one');
      const text = JSON.stringify([{ ...localStorage }, { ...sessionStorage }]);
      return { kept, long, size, odd, others, own: load('mine', 1).length, local: localStorage.length, text,
        other: load('mine', 2).length };
    }"""
    found = reader.page.evaluate(script)
    assert (found["kept"], found["long"], found["odd"]) == (30, "34", 0)
    assert found["size"] <= 2_000_000
    assert (found["others"], found["own"], found["other"], found["local"]) == (0, 1, 0, 0)
    assert "private" in found["text"] and "secret-of" not in found["text"]
    reader.audit()


def test_longest_document_is_stated_before_an_upload(reader: Reader, chatting: Behind):
    cluster = chatting.cluster()
    limit = min(cluster.model.max_context_tokens, sum(worker.max_tokens for worker in cluster.workers))
    reader.page.get_by_text(f"It may have up to {limit:,} tokens").wait_for()
    reader.choose(("short.txt", "Nothing of note."), ("long.txt", "x" * (8 * limit + 1)))
    dialog = reader.page.get_by_role("dialog")
    assert f"It may have up to {limit:,} tokens" in dialog.inner_text()
    rows = dialog.locator(".rows > li")
    assert "probably too long" not in rows.nth(0).inner_text()
    assert "The file is probably too long for this model." in rows.nth(1).inner_text()
    reader.audit()


def test_ask_again_is_offered_only_where_it_may_help(reader: Reader):
    page = reader.page
    open_chat(reader)
    error = {"message": "too long", "type": "invalid_request_error", "code": "invalid_value"}
    statuses = iter((400, 503))
    page.route(
        "**/chat/completions",
        lambda route: route.fulfill(status=next(statuses), body=json.dumps({"error": error}), headers={}),
    )
    page.locator("#question").fill("Who?")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("The request is invalid: too long.").wait_for()
    assert not page.get_by_role("button", name="Ask again").count()
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Longest answer, in tokens").fill("5")
    page.get_by_role("button", name="Ask again").click()
    page.get_by_role("alert").get_by_text("The service is not available").wait_for()
    answer_with(reader, "He.")
    page.get_by_role("button", name="Ask again").click()
    page.get_by_text("He.", exact=True).wait_for()
    reader.audit(OF_A_STATUS.format("(400|503)"))
