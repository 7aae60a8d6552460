"""`longleaf ingest`, `contexts`, `tokenize` and `detokenize`."""

import io
import sys
from pathlib import Path

import pytest

from longleaf.errors import CheckpointChanged
from longleaf.types import ContextSettings
from tests.support.service import byte_tokenizer
from tests.support.terminal import ANSWER, Terminal


async def test_context_is_forked(terminal: Terminal) -> None:
    terminal.engine.contexts["moby"] = [1, 2, 3]
    code, out, _ = await terminal.run("contexts", "fork", "moby", "ishmael", "--tokens", "2")
    assert (code, out.splitlines()[0]) == (0, "ishmael: 2 tokens, 128 B of keys and values on 1 rank")
    [context] = await terminal.json("contexts", "fork", "moby", "ahab")
    assert (context["id"], context["tokens"]) == ("ahab", 3)


async def test_context_is_recomputed(terminal: Terminal) -> None:
    terminal.engine.earlier = {
        "moby": [1, 2, 3],
        "dick": [4, 5],
        "ahab": CheckpointChanged("contexts/ahab", "tokenizer.json changed"),
    }
    code, out, _ = await terminal.run("contexts", "recompute", "moby")
    assert (code, out) == (0, "moby: 3 tokens, 192 B of keys and values on 1 rank\n")
    code, _, err = await terminal.run("contexts", "recompute", "ahab")
    assert (code, "tokenizer.json changed" in err) == (2, True)
    code, out, _ = await terminal.run("contexts", "recompute", "--all")
    assert code == 0
    assert [line.partition(":")[0] for line in out.splitlines()] == ["dick", "skipped", "skipped"]
    [found] = await terminal.json("contexts", "recompute", "--all")
    assert [each["name"] for each in found["skipped"]] == ["ahab", "dick", "moby"]
    terminal.engine.earlier = {}
    _, out, _ = await terminal.run("contexts", "recompute", "--all")
    assert out == "there are no contexts of previous checkpoints\n"
    for wrong in ((), ("moby", "--all")):
        code, _, err = await terminal.run("contexts", "recompute", *wrong)
        assert (code, "give the name of a context, or --all" in err) == (2, True)


async def test_context_is_updated(terminal: Terminal) -> None:
    terminal.engine.contexts["moby"] = [1, 2, 3]
    code, out, _ = await terminal.run("contexts", "update", "moby", "--display-name", "Moby-Dick", "--pin")
    assert (code, out.splitlines()[0]) == (0, "moby (Moby-Dick): 3 tokens, 192 B of keys and values on 1 rank")
    assert out.endswith("never expires, pinned\n")
    assert terminal.engine.settings["moby"] == ContextSettings(display_name="Moby-Dick", is_pinned=True)
    await terminal.json("contexts", "update", "moby", "--ttl", "60", "--unpin")
    assert terminal.engine.settings["moby"] == ContextSettings(ttl=60.0, is_pinned=False)
    [context] = await terminal.json("contexts", "update", "moby", "--forever")
    assert (terminal.engine.settings["moby"], context["expires"]) == (ContextSettings(expires=None), None)


async def test_ingest_carries_its_settings(terminal: Terminal, book: str) -> None:
    options = ("--ttl", "60", "--display-name", "Moby-Dick", "--pin", "--upload-id", "one", "--capacity", "500")
    [context] = await terminal.json("ingest", book, "--name", "moby", *options)
    wanted = ContextSettings(ttl=60.0, display_name="Moby-Dick", is_pinned=True, capacity=500)
    assert (context["tokens"], terminal.engine.settings["moby"]) == (172, wanted)
    await terminal.json("ingest", book, "--name", "dick", "--priority", "-4", "--client", "me", "--timeout", "60")
    scheduling = terminal.engine.schedulings[-1]
    assert (scheduling.priority, scheduling.client, scheduling.deadline is not None) == (-4, "me", True)


async def test_system_message_precedes_the_document(terminal: Terminal, book: str, tmp_path: Path) -> None:
    await terminal.json("ingest", book, "--name", "moby", "--system", "<|end|> Be brief.", "--upload-id", "one")
    plain, fast = byte_tokenizer(), byte_tokenizer()
    plain.encode_special_tokens = True
    opening = [*fast.encode("<|begin|><|user|>").ids, *plain.encode("<|end|> Be brief.").ids]
    assert terminal.engine.contexts["moby"] == [*opening, *plain.encode("Call me Ishmael. " * 10).ids]
    code, _, err = await terminal.run("ingest", book, "--name", "moby", "--append", "--system", "x")
    assert (code, err.startswith("error: --system: is only for new contexts")) == (2, True)
    (tmp_path / "ids").write_text("[1, 2]")
    code, _, err = await terminal.run(
        "ingest", str(tmp_path / "ids"), "--name", "b", "--token-ids", "json", "--system", "x"
    )
    assert (code, err.startswith("error: --system: requires a document of text")) == (2, True)


async def test_text_is_tokenized_and_detokenized(terminal: Terminal) -> None:
    ids = byte_tokenizer().encode("é!").ids
    assert (await terminal.run("tokenize", "é!"))[1] == " ".join(map(str, ids)) + "\n"
    [found] = await terminal.json("tokenize", "é!", "--spans")
    assert found == {"token_ids": ids, "spans": [[0, 1], [0, 1], [1, 2]]}
    assert "'é'" in (await terminal.run("tokenize", "é!", "--spans"))[1]
    assert (await terminal.run("detokenize", *map(str, ids)))[1] == "é!\n"
    special = str(byte_tokenizer().token_to_id("<|end|>"))
    assert await terminal.json("detokenize", special) == [{"text": ""}]
    assert await terminal.json("detokenize", special, "--special") == [{"text": "<|end|>"}]


async def test_document_may_come_from_standard_input(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße".encode())))
    [context] = await terminal.json("ingest", "-", "--name", "moby")
    assert context["tokens"] == 2 + len(ANSWER)


async def test_several_files_form_one_document(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes("Grü".encode()[:3])  # cut inside a character
    (tmp_path / "c").write_bytes(b"e")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grü".encode()[3:] + "ß".encode())))
    await terminal.json("ingest", str(tmp_path / "a"), "-", str(tmp_path / "c"), "--name", "moby", "--no-file-headers")
    assert terminal.engine.contexts["moby"][2:] == [i for (i,) in ANSWER]


@pytest.mark.parametrize(
    ("format", "content"),
    [
        ("json", b"[5, 6, 260]"),
        ("json", b'{"token_ids": [5, 6, 260], "spans": null}'),
        ("uint16", b"\5\0\6\0\4\1"),
        ("uint32", b"\5\0\0\0\6\0\0\0\4\1\0\0"),
    ],
)
async def test_token_ids_in_files_are_used_unchanged(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, content: bytes
) -> None:
    monkeypatch.setattr("longleaf.cli.token_files.PIECE_BYTES", 5)
    (tmp_path / "ids").write_bytes(content)
    file = str(tmp_path / "ids")
    [context] = await terminal.json("ingest", file, file, "--name", "moby", "--token-ids", format)
    assert (context["tokens"], terminal.engine.contexts["moby"]) == (6, [5, 6, 260] * 2)


@pytest.mark.parametrize(
    ("format", "content", "message"),
    [
        ("json", b"[5, -6]", "-6"),
        ("json", b"[5, 6", "is not a JSON list of token ids: "),
        ("json", b"[5.5]", "is not a JSON list of token ids: "),
        ("json", b"{}", "is not a JSON list of token ids: "),
        ("json", b"[5, 99999]", "99999 is not in the vocabulary of 261 tokens"),
        ("json", b"[]", "the document is empty"),
        ("uint16", b"\5\0\6", "ends inside a token id: each uint16 has 2 bytes"),
        ("uint32", b"\5\0\6", "ends inside a token id: each uint32 has 4 bytes"),
    ],
)
async def test_files_without_token_ids_are_reported_by_name(
    terminal: Terminal, tmp_path: Path, format: str, content: bytes, message: str
) -> None:
    (tmp_path / "ids").write_bytes(content)
    code, _, err = await terminal.run("ingest", str(tmp_path / "ids"), "--name", "moby", "--token-ids", format)
    assert code == 2
    assert err.startswith(f"error: {tmp_path / 'ids'}: ")
    assert message in err
    assert err.count("\n") == 1
    assert not terminal.engine.contexts


async def test_missing_file_is_reported_before_any_is_read(terminal: Terminal, book: str) -> None:
    for options in ((), ("--token-ids", "json")):
        code, _, err = await terminal.run("ingest", book, "/nowhere", "--name", "moby", *options)
        assert (code, err) == (2, "error: file: /nowhere cannot be read: No such file or directory\n")


async def test_piped_table_is_not_cut(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "a-book-with-a-name-" + "x" * 100
    terminal.engine.contexts[name] = [1, 2, 3]
    code, out, _ = await terminal.run("contexts", "list")
    assert code == 0
    assert name in out and "expires" in out and "…" not in out
