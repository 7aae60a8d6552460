"""The page with a keyboard, with a screen reader, and on small screens."""

import json
import re
from typing import Any

import pytest

from tests.support.browser import Reader
from tests.support.gateway_fakes import Behind

TEXT = "Nothing of note is written here, and nothing will be.\namber-12 = 4711\njade-7 = 0815\n" * 5
LONG_WORD = "donaudampfschifffahrtsgesellschaftskapitaenskajuetentuerschloss"
# accessibility checks of the page's elements; returns the violations
CHECK = """() => {
  const wrong = [];
  const shown = (each) => each.checkVisibility() && !each.closest('[aria-hidden=true]');
  const words = (each, attribute) => (each.getAttribute(attribute) ?? '').split(' ').filter(Boolean);
  const text = (ids) => ids.map((id) => document.getElementById(id)?.textContent ?? '').join(' ').trim();
  const name = (each) => each.getAttribute('aria-label') || text(words(each, 'aria-labelledby'))
    || each.labels?.[0]?.textContent.trim() || (each.matches('button, a, summary') && each.textContent.trim());
  const controls = document.querySelectorAll('button, a, input, select, textarea, [role], dialog');
  for (const each of [...controls].filter(shown)) {
    const isPlain = ['status', 'alert'].includes(each.getAttribute('role'));
    if (!isPlain && !name(each)) wrong.push(`nameless: ${each.outerHTML.slice(0, 80)}`);
    if (each.tabIndex > 0) wrong.push(`out of order: ${each.outerHTML.slice(0, 80)}`);
  }
  const ids = [...document.querySelectorAll('[id]')].map((each) => each.id);
  if (new Set(ids).size !== ids.length) wrong.push('an id is there twice');
  for (const each of document.querySelectorAll('[aria-labelledby], [aria-describedby]'))
    for (const id of [...words(each, 'aria-labelledby'), ...words(each, 'aria-describedby')])
      if (!document.getElementById(id)) wrong.push(`no such id: ${id}`);
  if (document.querySelectorAll('main').length !== 1) wrong.push('not one main');
  if (document.querySelectorAll('h1').length > 1) wrong.push('more than one h1');
  if (!document.documentElement.lang || !document.title) wrong.push('no language or title');
  for (const list of document.querySelectorAll('ul, ol'))
    if ([...list.children].some((each) => each.tagName !== 'LI')) wrong.push('a list of something else');
  return wrong;
}"""
# contrast of text and background by the WCAG 2 formula; returns ratios under 4.5
CONTRAST = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const each of document.querySelectorAll('body *')) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !each.checkVisibility() || each.matches(':disabled, .unseen, .skip, option')) continue;
    const [a, b] = [light(parse(getComputedStyle(each).color)), light(behind(each))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)}: ${each.textContent.trim().slice(0, 40)}`);
  }
  return low;
}"""
# whether the input, which sticks to the window, covers no part of the answers
LAST_IN_SIGHT = """() => document.querySelector('.turns').getBoundingClientRect().bottom
  <= document.querySelector('.field-of-question').getBoundingClientRect().top"""


def focused(reader: Reader) -> str:
    """Accessible name of the focused element."""
    return reader.page.evaluate(
        "(document.activeElement.getAttribute('aria-label') ?? document.activeElement.labels?.[0]?.textContent"
        " ?? document.activeElement.textContent).trim()"
    )


def tab_to(reader: Reader, name: str, backwards: bool = False) -> None:
    for _ in range(40):
        reader.page.keyboard.press("Shift+Tab" if backwards else "Tab")
        if re.fullmatch(name, focused(reader)):
            return
    raise AssertionError(f"the focus never comes to {name}")


def test_every_action_works_by_keyboard(reader: Reader, behind: Behind):
    page = reader.page
    page.get_by_role("heading", name="Add your first document").wait_for()
    keys = page.keyboard
    file = {"name": "Stock.txt", "mimeType": "text/plain", "buffer": TEXT.encode()}
    page.on("filechooser", lambda chooser: chooser.set_files([file]))
    tab_to(reader, "Add documents…")
    keys.press("Enter")
    page.get_by_role("dialog").wait_for()
    assert focused(reader) == "Name"
    keys.press("Enter")
    page.get_by_role("heading", name="Stock", exact=True).wait_for()
    assert focused(reader) == "Stock"
    tab_to(reader, "Pin")
    keys.press("Space")
    page.get_by_role("button", name="Pinned", pressed=True).wait_for()
    tab_to(reader, "Ask this document")
    keys.type("What is the value of amber-12?")
    keys.press("Enter")
    page.locator(".foot").wait_for()
    assert page.locator(".answer").inner_text().strip().startswith("amber-12 is 4711")
    assert focused(reader) == "Ask this document"
    tab_to(reader, "Fork…", backwards=True)
    keys.press("Enter")
    page.get_by_role("dialog").wait_for()
    keys.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert focused(reader) == "Fork…"
    keys.press("Enter")
    keys.press("Enter")
    page.get_by_role("heading", name="stock-fork").wait_for()
    tab_to(reader, "Delete…")
    keys.press("Enter")
    page.get_by_role("dialog").wait_for()
    assert focused(reader) == "Keep it"
    keys.press("Tab")
    keys.press("Enter")
    page.get_by_role("heading", name="Choose a document").wait_for()
    tab_to(reader, "Stock.*")
    keys.press("Enter")
    page.get_by_role("heading", name="Stock", exact=True).wait_for()
    assert {context.id: context.is_pinned for context in behind.contexts()} == {"stock": True}
    reader.audit()


def test_screen_reader_announces_events_but_not_single_tokens(reader: Reader):
    page = reader.page
    page.evaluate(
        "globalThis.said = []; const status = document.querySelector('.unseen[role=status]');"
        "const observer = new MutationObserver(() => said.push(status.textContent));"
        "observer.observe(status, {childList: true, characterData: true, subtree: true})"
    )
    reader.add(("stock.txt", TEXT))
    page.locator("#question").wait_for()
    answer = reader.ask("What is the value of amber-12?")
    output = [sentence.strip() for sentence in page.evaluate("said")]
    assert output[-2:] == ["Asked.", f"Answered: {answer}"]
    assert "stock.txt is ready." in output and len(output) < 10
    reader.audit()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 800, 1280])
def test_labels_layout_and_contrast_are_correct_at_every_width(browser: Any, behind: Behind, width: int, scheme: str):
    size = {"width": width, "height": 640}
    with Reader(browser, behind.url, viewport=size, color_scheme=scheme, reduced_motion="reduce") as reader:
        page = reader.page

        def check() -> None:
            assert page.evaluate(CHECK) == []
            assert page.evaluate(CONTRAST) == []
            assert reader.fits()

        page.get_by_role("heading", name="Add your first document").wait_for()
        check()
        reader.choose((f"{LONG_WORD}.txt", TEXT), ("b.txt", ""))
        check()
        page.get_by_role("button", name="Upload").click()
        page.locator("#question").wait_for()
        check()
        reader.ask("What is the value of amber-12?")
        check()
        page.get_by_role("button", name="Fork…").click()
        check()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Delete…").click()
        check()
        reader.audit()


def test_document_list_collapses_on_a_small_screen(browser: Any, behind: Behind):
    behind.ingest("notes", TEXT)
    with Reader(browser, behind.url, viewport={"width": 320, "height": 640}) as reader:
        page = reader.page
        page.get_by_role("link", name="notes").click()
        page.locator("#question").wait_for()
        assert not page.get_by_role("heading", name="Documents").is_visible()
        page.get_by_role("link", name="Back to the documents").click()
        page.get_by_role("heading", name="Documents").wait_for()
        page.go_back()
        page.locator("#question").wait_for()
        reader.audit()


def test_last_answer_stays_visible_on_a_small_screen_unless_the_reader_scrolls_up(browser: Any, behind: Behind):
    behind.ingest("notes", TEXT)
    with Reader(browser, behind.url, viewport={"width": 320, "height": 640}) as reader:
        page = reader.page
        page.get_by_role("link", name="notes").click()
        for _ in range(4):
            reader.ask("What is the value of amber-12?")
        page.wait_for_function(LAST_IN_SIGHT)
        page.locator("#question").fill("What is the value of jade-7?")
        with behind.frozen_ranks():
            page.keyboard.press("Enter")
            page.get_by_text("Asking…").wait_for()
            page.evaluate("scrollTo(0, 0)")
        page.locator(".foot").nth(4).wait_for()
        assert page.evaluate("scrollY") == 0
        reader.audit()


def test_page_has_landmarks(reader: Reader, behind: Behind):
    behind.ingest("notes", TEXT)
    page = reader.page
    page.get_by_role("link", name="notes").click()
    page.locator("#question").wait_for()
    snapshot = page.locator("body").aria_snapshot()
    for line in (
        "- banner",
        "- main",
        '- complementary "Documents"',
        '- complementary "Memory"',
        '- textbox "Ask this document"',
    ):
        assert line in snapshot
    reader.audit()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Moby Dick; or, The Whale (1851).txt", "moby-dick-or-the-whale-1851"),
        ("Die Wahlverwandtschaften.TXT", "die-wahlverwandtschaften"),
        ("Größe.md", "grosse"),
        ("白鯨.txt", "document"),
        ("...", "document"),
        ("a" * 200 + ".txt", "a" * 63),
        ("data.v2_final.csv", "data.v2_final"),
        ("x" * 62 + " y.txt", "x" * 62),
    ],
)
def test_document_names_are_derived_from_file_names(reader: Reader, name: str, found: str):
    calls = f"[files.nameOf({json.dumps(name)}), files.complaint({json.dumps(found)})]"
    script = f"import('/page/files.js').then((files) => {calls})"
    assert reader.page.evaluate(script) == [found, ""]


def test_events_are_parsed_the_same_for_every_split_of_the_stream(reader: Reader):
    script = """async () => {
      const { eventsOf } = await import('/page/sse.js');
      const text = ': queued 3\\n\\ndata: {"a":"鯨🐋"}\\r\\n\\r\\nevent: error\\ndata: 1\\ndata: 2\\n\\ndata: cut';
      const bytes = new TextEncoder().encode(text);
      const read = async (sizes) => {
        let at = 0;
        const body = new ReadableStream({ pull(c) {
          if (at >= bytes.length) return c.close();
          const size = sizes();
          c.enqueue(bytes.slice(at, (at += size)));
        } });
        const found = [];
        for await (const event of eventsOf({ body })) found.push(event);
        return JSON.stringify(found);
      };
      const found = new Set([await read(() => bytes.length)]);
      for (let size = 1; size < bytes.length; size += 1) found.add(await read(() => size));
      return [...found];
    }"""
    [events] = reader.page.evaluate(script)
    assert json.loads(events) == [
        {"comment": "queued 3"},
        {"type": "message", "data": '{"a":"鯨🐋"}'},
        {"type": "error", "data": "1\n2"},
    ]
