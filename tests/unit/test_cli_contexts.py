"""`longleaf ingest`, `contexts`, `tokenize` and `detokenize`."""

import io
import sys

import pytest

from longleaf.messages import ContextSettings
from tests.service import byte_tokenizer
from tests.unit.conftest import ANSWER, Terminal


async def test_a_context_is_forked(terminal: Terminal) -> None:
    terminal.engine.contexts["moby"] = [1, 2, 3]
    code, out, _ = await terminal.run("contexts", "fork", "moby", "ishmael", "--tokens", "2")
    assert (code, out.splitlines()[0]) == (0, "ishmael: 2 tokens, 128 B of keys and values on 1 rank")
    [context] = await terminal.json("contexts", "fork", "moby", "ahab")
    assert (context["id"], context["tokens"]) == ("ahab", 3)


async def test_a_context_is_updated(terminal: Terminal) -> None:
    terminal.engine.contexts["moby"] = [1, 2, 3]
    code, out, _ = await terminal.run("contexts", "update", "moby", "--display-name", "Moby-Dick", "--pin")
    assert (code, out.splitlines()[0]) == (0, "moby (Moby-Dick): 3 tokens, 192 B of keys and values on 1 rank")
    assert out.endswith("never expires, pinned\n")
    assert terminal.engine.settings["moby"] == ContextSettings(display_name="Moby-Dick", is_pinned=True)
    await terminal.json("contexts", "update", "moby", "--ttl", "60", "--unpin")
    assert terminal.engine.settings["moby"] == ContextSettings(ttl=60.0, is_pinned=False)
    [context] = await terminal.json("contexts", "update", "moby", "--forever")
    assert (terminal.engine.settings["moby"], context["expires"]) == (ContextSettings(expires=None), None)


async def test_an_ingest_carries_its_settings(terminal: Terminal, book: str) -> None:
    options = ("--ttl", "60", "--display-name", "Moby-Dick", "--pin", "--upload-id", "one", "--capacity", "500")
    [context] = await terminal.json("ingest", book, "--name", "moby", *options)
    wanted = ContextSettings(ttl=60.0, display_name="Moby-Dick", is_pinned=True, capacity=500)
    assert (context["tokens"], terminal.engine.settings["moby"]) == (172, wanted)


async def test_texts_become_tokens_and_back(terminal: Terminal) -> None:
    ids = byte_tokenizer().encode("é!").ids
    assert (await terminal.run("tokenize", "é!"))[1] == " ".join(map(str, ids)) + "\n"
    [found] = await terminal.json("tokenize", "é!", "--spans")
    assert found == {"token_ids": ids, "spans": [[0, 1], [0, 1], [1, 2]]}
    assert "'é'" in (await terminal.run("tokenize", "é!", "--spans"))[1]
    assert (await terminal.run("detokenize", *map(str, ids)))[1] == "é!\n"
    special = str(byte_tokenizer().token_to_id("<|end|>"))
    assert await terminal.json("detokenize", special) == [{"text": ""}]
    assert await terminal.json("detokenize", special, "--special") == [{"text": "<|end|>"}]


async def test_standard_input_is_a_document_too(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße".encode())))
    [context] = await terminal.json("ingest", "-", "--name", "moby")
    assert context["tokens"] == 2 + len(ANSWER)
