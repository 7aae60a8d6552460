"""An extraction process that a hostile file has taken over: its messages and its end are not trusted."""

import os
import signal
import tempfile
from pathlib import Path

import msgspec
import pytest

from longleaf.documents import extraction_process
from longleaf.documents.confinement import confine
from longleaf.documents.extraction_process import ExtractedFile, ExtractionProcess, extract
from longleaf.documents.limits import ExtractionLimits
from longleaf.documents.messages import Confined, ExtractionEnded, MemberSkipped, MemberStarted, TextFound, encode
from longleaf.errors import InvalidArgument

LIMITS = ExtractionLimits(num_sections=100, text_bytes=1000, seconds=60.0)
HOUR = "import time; time.sleep(3600)"
TEXT = msgspec.msgpack.encode({"type": "text", "label": "", "text": "X"})
FAILED = "cannot be read: its reader failed"


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def attempt(
    monkeypatch: pytest.MonkeyPatch, output: bytes, then: str = "", *, count: int = 1, limits: ExtractionLimits = LIMITS
) -> ExtractedFile | str:
    """The result, or the reason for none, if the process writes `output` `count` times, and then runs `then`."""
    with tempfile.TemporaryDirectory() as folder:
        (content := Path(folder) / "output").write_bytes(output)
        program = f"import os\nfor _ in range({count}): os.write(1, open({str(content)!r}, 'rb').read())\n{then}"
        monkeypatch.setattr(extraction_process, "STARTER", program)
        (file := Path(folder) / "a.txt").write_bytes(b"x")
        with file.open("rb") as opened:
            try:
                return extract(opened, "a.txt", limits=limits)
            except InvalidArgument as error:
                return error.description


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (b"\xff" * 8, FAILED),
        (framed(b"\xdd\xff\xff\xff\xff"), FAILED),
        (framed(b"\x91" * 1_000_000), FAILED),
        (framed(b"\x83" + msgspec.msgpack.encode("unknown") + b"\x91" * 1_000_000), FAILED),
        (framed(TEXT.replace(b"\xa1X", b"\xa1\xff")), FAILED),
        (framed(TEXT.replace(b"\xa1X", b"\xa3\xed\xa0\x80")), FAILED),
        (framed(encode(MemberStarted("m" * 2048)))[:-1], "is damaged, or needs too much memory"),
        (framed(*[encode(MemberStarted("m"))] * 102), "has more than 100 sections"),
        (framed(*[encode(Confined(()))] * 102), "has more than 100 sections"),
        (framed(*[encode(TextFound("", ""))] * 101), "has more than 100 sections"),
        (framed(encode(TextFound("", "a" * 1000))), "has more than 1,000 bytes of text and names"),
        (framed(*[encode(MemberSkipped("m" * 400, ""))] * 3), "has more than 1,000 bytes of text and names"),
    ],
)
def test_malformed_messages_give_one_sentence(monkeypatch: pytest.MonkeyPatch, output: bytes, reason: str) -> None:
    found = attempt(monkeypatch, output)
    assert isinstance(found, str)
    assert reason in found


def test_flood_of_messages_without_text_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    flood = framed(*[encode(MemberStarted("m"))] * 1000)
    assert "has more than 100 sections" in str(attempt(monkeypatch, flood, HOUR, count=1 << 40))


def test_names_and_reasons_are_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    control = "\x1b[2J\n\u202e"
    messages = MemberStarted(control), TextFound(control, "text"), MemberSkipped(control, control), ExtractionEnded()
    found = attempt(monkeypatch, framed(*map(encode, messages)))
    assert isinstance(found, ExtractedFile)
    (section,), (left_out,) = found.sections, found.left_out
    shown = (section.file, section.label, left_out.file, left_out.reason)
    assert all(each.isprintable() for each in shown), shown


@pytest.mark.parametrize("then", [HOUR, f"os.close(1)\n{HOUR}", f"os.kill(os.getpid(), {int(signal.SIGSTOP)})"])
def test_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """It may have closed its output, or be stopped."""
    monkeypatch.setattr(extraction_process, "WITHIN", 0.0)
    limits = ExtractionLimits(seconds=0.5)
    assert attempt(monkeypatch, b"", then, limits=limits) == "took more than 0.5 s"


def test_process_that_reports_its_end_and_runs_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attempt(monkeypatch, framed(encode(TextFound("", "text")), encode(ExtractionEnded())), HOUR)
    assert isinstance(found, ExtractedFile)


def test_reason_of_a_killed_process_is_not_processor_time(tmp_path: Path) -> None:
    """The kernel kills it first if memory runs out."""
    (tmp_path / "a.txt").write_text("x")

    def kill(process: ExtractionProcess) -> None:
        os.kill(process._process.pid, signal.SIGKILL)

    with (tmp_path / "a.txt").open("rb") as file, pytest.raises(InvalidArgument, match="too little memory"):
        extract(file, "a.txt", on_start=kill)


def test_processor_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = f"""
from {confine.__module__} import confine
from {ExtractionLimits.__module__} import ExtractionLimits
confine(ExtractionLimits(cpu_seconds=1), 0)
while True: pass
"""
    starter = f"import sys; sys.path[:] = sys.argv[2].split(chr(10)){endless}"
    assert attempt(monkeypatch, b"", starter) == "needs more than 60 s of processor time"
