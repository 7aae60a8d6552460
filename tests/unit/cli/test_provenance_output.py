"""`longleaf ask --sources`."""

from typing import cast

import pytest

from longleaf.cli.provenance_output import excerpt
from longleaf.client import Client
from longleaf.types import ContextText, Source
from tests.support.service import BYTES
from tests.support.terminal import Terminal

TEXT = "".join(f"line {i} of the book\n" for i in range(20))


@pytest.fixture
def asking(terminal: Terminal) -> Terminal:
    terminal.engine.contexts["moby"] = BYTES.encode(TEXT).ids
    return terminal


class TemplatedText:
    """A client of a context whose first 9 tokens are the chat template, and the others one letter each."""

    def get_context_text(self, name: str, token_start: int, token_end: int) -> ContextText:
        text = "<template>"[token_start:9] + TEXT[max(0, token_start - 9) : token_end - 9]
        first, last = (max(0, position - 9) for position in (token_start, token_end))
        places = {"token_start": token_start, "token_end": token_end, "byte_start": first, "byte_end": last}
        return ContextText(text=text, file="a", line=1, **places)


@pytest.mark.parametrize(("start", "before"), [(9, ""), (12, TEXT[:3]), (60, TEXT[27:51])])
def test_excerpt_does_not_show_the_chat_template(start: int, before: str) -> None:
    client = cast(Client, TemplatedText())
    shares = {"share": 0.5, "largest_share": 0.5, "largest_layer": 0, "largest_head": 0}
    found = excerpt(client, "moby", Source(token_start=start, token_end=start + 32, **shares), 9 + len(TEXT))
    assert found is not None
    assert (found.before, found.text) == (before, TEXT[start - 9 : start + 23])


async def test_sources_are_printed_under_the_answer(asking: Terminal) -> None:
    code, out, _ = await asking.run("ask", "moby", "who?", "--sources", "--source-count", "2")
    assert code == 0
    answer, first, *rest = out.splitlines()
    assert answer == "Grüße"
    assert first.startswith("[1] tokens ")
    assert "%" in first and "nats" not in first
    assert any("of the book" in line for line in rest)
    assert rest[-2].startswith("[attention: ")
    assert rest[-1].startswith("[percent: share of attention, ranked by its excess")
    prompt, baseline = asking.engine.prompts
    assert prompt.cuts is not None
    assert prompt.cuts.size == 64
    assert baseline.is_probe


async def test_confirmed_sources_have_drops(asking: Terminal) -> None:
    _, out, _ = await asking.run("ask", "moby", "who?", "--sources", "--confirm", "--source-count", "1")
    assert "nats" in out
    *_, last = await asking.json("ask", "moby", "who?", "--sources", "--confirm", "--source-count", "3")
    found = last["attribution"]["sources"]
    assert 0 < len(found) <= 3
    assert all(each["drop"] > 0 and each["contrast"] is not None for each in found)


async def test_raw_sources_are_not_compared_with_a_neutral_question(asking: Terminal) -> None:
    _, out, _ = await asking.run("ask", "moby", "who?", "--sources", "--raw", "--source-count", "2")
    assert out.splitlines()[-1] == "[percent: share of attention]"
    *_, last = await asking.json("ask", "moby", "who?", "--sources", "--raw")
    found = last["attribution"]["sources"]
    assert found
    assert all(each.get("contrast") is None for each in found)
    assert not any(prompt.is_probe for prompt in asking.engine.prompts)


async def test_without_sources_no_attribution_is_requested_or_printed(asking: Terminal) -> None:
    *_, last = await asking.json("ask", "moby", "who?", "--hide", "9-12", "--hide", "0-3")
    assert "attribution" not in last
    assert not last["is_exact"]
    [prompt] = asking.engine.prompts
    assert (prompt.cuts, prompt.hidden) == (None, ((0, 3), (9, 12)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--confirm",), "--confirm: needs --sources"),
        (("--raw",), "--raw: needs --sources"),
        (("--hide", "3"), "--hide: '3' is not A-B"),
        (("--hide", "a-b"), "--hide: 'a-b' is not A-B"),
        (("--hide", "3-3"), "hidden[0]"),
        (("--sources", "--source-count", "65"), "provenance.span_count"),
    ],
)
async def test_invalid_options_are_named(asking: Terminal, options: tuple[str, ...], message: str) -> None:
    code, _, err = await asking.run("ask", "moby", "who?", *options)
    assert code != 0
    assert message in err
