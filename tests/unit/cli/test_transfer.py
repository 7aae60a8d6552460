"""`longleaf contexts export` and `import`."""

import io
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from longleaf.cli.transfer import summary
from longleaf.types import Context
from tests.support.archives import packable
from tests.support.fakes.transfer_engine import FakeTransferEngine
from tests.support.service import FakeEngine, serving
from tests.support.terminal import Terminal
from tests.support.transfer_engines import empty_transfer_engine, transfer_engine_of

MOBY = packable(vocabulary=256)
WHOLE = MOBY.packed()


@pytest.fixture
def old() -> FakeTransferEngine:
    return transfer_engine_of(MOBY)


@pytest.fixture
def new() -> FakeTransferEngine:
    return empty_transfer_engine()


@pytest.fixture
async def source_terminal(
    old: FakeTransferEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Terminal]:
    async with serving(FakeEngine(), tmp_path / "old-model", transfers=old) as (_, address):
        yield Terminal(address, FakeEngine(), capsys)


@pytest.fixture
async def target_terminal(
    new: FakeTransferEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Terminal]:
    async with serving(FakeEngine(), tmp_path / "new-model", transfers=new) as (_, address):
        yield Terminal(address, FakeEngine(), capsys)


async def test_context_is_exported_and_imported(
    source_terminal: Terminal, target_terminal: Terminal, new: FakeTransferEngine, tmp_path: Path
) -> None:
    file = tmp_path / "moby.context"
    code, out, _ = await source_terminal.run("contexts", "export", "moby", str(file))
    assert (code, out.replace("\n", " ")) == (0, f"moby: {len(WHOLE) / 1024:.1f} KiB in {file} ")
    assert file.read_bytes() == WHOLE
    code, out, _ = await target_terminal.run("contexts", "import", str(file), "--name", "dick")
    assert (code, out) == (
        0,
        "dick: 11 tokens; keys and values are loaded on the first request\n",
    )
    assert list(new.contexts) == ["dick"]


async def test_json_output_describes_export_and_import(
    source_terminal: Terminal, target_terminal: Terminal, new: FakeTransferEngine, tmp_path: Path
) -> None:
    path = tmp_path / "moby"
    file = str(path)
    [answer] = await source_terminal.json("contexts", "export", "moby", file, "--without-keys")
    assert (answer["context"], answer["file"], answer["num_bytes"]) == ("moby", file, len(path.read_bytes()))
    assert (answer["num_bytes"] < len(WHOLE), len(answer["digest"])) == (True, 64)
    [answer] = await target_terminal.json("contexts", "import", file)
    assert (answer["context"]["id"], answer["context"]["tokens"], answer["key_tokens"]) == ("moby", 11, 0)
    assert new.objects == {}


async def test_pipe_carries_only_the_archive(
    source_terminal: Terminal, target_terminal: Terminal, new: FakeTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(pipe, write_through=True))
        assert (await source_terminal.run("contexts", "export", "moby", "-"))[0] == 0
        assert pipe.getvalue() == WHOLE
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(WHOLE)))
    [answer] = await target_terminal.json("contexts", "import", "-")
    assert (answer["key_tokens"], list(new.contexts)) == (11, ["moby"])


async def test_export_is_resumed_from_a_partial_file(source_terminal: Terminal, tmp_path: Path) -> None:
    file, part, digest = (tmp_path / name for name in ("moby", "moby.part", "moby.part.digest"))
    part.write_bytes(WHOLE[:500])
    digest.write_text(MOBY.packing().digest)
    assert (await source_terminal.run("contexts", "export", "moby", str(file), "--resume"))[0] == 0
    assert (file.read_bytes(), part.exists(), digest.exists()) == (WHOLE, False, False)
    part.write_bytes(WHOLE[:500])
    digest.write_text("0" * 64)
    code, _, err = await source_terminal.run("contexts", "export", "moby", str(tmp_path / "moby"), "--resume")
    assert (code, err) == (2, f"error: file: {file} exists; move it, or give another name\n")
    file.unlink()
    code, _, err = await source_terminal.run("contexts", "export", "moby", str(tmp_path / "moby"), "--resume")
    message = "error: contexts/moby: it has changed since the export started; export it again\n"
    assert (code, err) == (2, message)
    digest.write_text("")
    code, _, err = await source_terminal.run("contexts", "export", "moby", str(tmp_path / "moby"), "--resume")
    message = f"error: --resume: {digest} has no digest of {part}: export again without resume\n"
    assert (code, err, part.read_bytes()) == (2, message, WHOLE[:500])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("export", "dick", "FILE"),
            "error: there is no context named dick; `longleaf contexts list` lists all contexts\n",
        ),
        (("export", "moby", "FILE", "--resume"), "error: --resume: there is no FILE.part to continue\n"),
        (("export", "moby", "-", "--resume"), "error: --resume: cannot be combined with -\n"),
        (("export", "moby", "-", "--json"), "error: --json: cannot be combined with -\n"),
        (("import", "/nowhere"), "error: file: /nowhere cannot be read: No such file or directory\n"),
    ],
)
async def test_errors_are_one_line(
    source_terminal: Terminal, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    file = str(tmp_path / "file")
    code, out, err = await source_terminal.run("contexts", *(each.replace("FILE", file) for each in arguments))
    assert (code, out, err) == (2, "", message.replace("FILE", file))
    assert not any(name.startswith("file") for name in os.listdir(tmp_path))


async def test_files_that_are_not_archives_are_refused(
    target_terminal: Terminal, new: FakeTransferEngine, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"Call me Ishmael. Some years ago")
    code, _, err = await target_terminal.run("contexts", "import", str(file))
    assert (code, err) == (2, f"error: {file}: this is not an exported context (after 24 bytes)\n")
    file.write_bytes(WHOLE[:900])
    code, _, err = await target_terminal.run("contexts", "import", str(file))
    assert (code, err) == (2, f"error: {file}: it is truncated: its end is missing (after 900 bytes)\n")
    assert (new.contexts, new.objects) == ({}, {})


def test_summary_reports_restored_and_recomputed_tokens() -> None:
    context = Context(id="moby", tokens=1000, kv_bytes=0, created=1.0, updated=1.0)
    assert summary(context, 0) == "moby: 1,000 tokens; keys and values are computed on the first request"
    assert summary(context, 900).endswith("on the first request, 900 of them are loaded and 100 computed")
    assert summary(context, None).endswith("already imported")
