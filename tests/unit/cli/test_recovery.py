"""The output of the command line for lost ranks, and while their keys are recomputed."""

import io
from typing import Any

import msgspec
import pytest

from coordinator import engine_messages
from longleaf.cli.cluster import loss_line, loss_lines, recovery_lines
from longleaf.cli.generate import RecoveryLine
from longleaf.cli.ingest import progress_bar
from longleaf.errors import ContextLost
from longleaf.types import IngestProgress, Loss, Recovering, Recovery
from tests.support.service import ids, tokens
from tests.support.terminal import Terminal

LOSS = Loss(time=97.0, member=5, rank=2, epoch=1, node="b", reason="killed by signal 9", slot="starting")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "rank 2 of epoch 1 on node b was lost 3 s ago: killed by signal 9; its slot is being filled"),
        (
            {"slot": "replaced", "time": 100.5},
            "rank 2 of epoch 1 on node b was lost 0 s ago: killed by signal 9; its slot is filled",
        ),
        ({"slot": "waiting", "retry_time": 112.0}, "killed by signal 9; its slot will be filled in 12 s"),
        ({"slot": "waiting", "retry_time": 99.0}, "killed by signal 9; its slot will be filled"),
        ({"slot": "waiting"}, "killed by signal 9; its slot will be filled"),
        (
            {"slot": "abandoned", "slot_reason": "lost three times while loading"},
            "stays empty: lost three times while loading",
        ),
        ({"slot": "abandoned"}, "killed by signal 9; its slot stays empty"),
        ({"slot": "unspecified"}, "killed by signal 9"),
        (
            {"rank": None, "time": -3600.0},
            "member 5 on node b was lost 1 h 1 min ago: killed by signal 9; its slot is being filled",
        ),
        ({"rank": None, "node": ""}, "member 5 was lost 3 s ago: killed by signal 9; its slot is being filled"),
    ],
    ids=str,
)
def test_loss_is_reported_with_the_state_of_its_slot(changes: dict[str, Any], message: str) -> None:
    line = loss_line(msgspec.structs.replace(LOSS, **changes), now=100.0)
    assert line.endswith(message)
    assert line.startswith(("rank 2 of", "member 5"))


def test_reason_for_an_empty_slot_is_printed_once_in_a_row() -> None:
    changes: list[dict[str, Any]] = [{}, {"slot": "abandoned", "slot_reason": "a"}, {"slot": "abandoned"}]
    losses = [msgspec.structs.replace(LOSS, **changes[number]) for number in (0, 1, 1, 2, 1, 1)]
    lines = [line.partition("its slot ")[2] for line in loss_lines(losses, now=100.0)]
    empty = "stays empty"
    assert lines == ["is being filled", empty, f"{empty}: a", empty, empty, f"{empty}: a"]


def test_recovery_is_reported_during_and_after_it() -> None:
    recovery = Recovery(epoch=2, lost_tokens=65_536, recovered_tokens=12_288, seconds=0.4, is_done=False)
    assert recovery_lines(recovery) == ["recovering: 12,288 of 65,536 tokens, 400 ms"]
    over = msgspec.structs.replace(recovery, is_done=True, dropped_contexts=("ahab", "moby"))
    assert recovery_lines(over) == [
        "recovered 12,288 of 65,536 lost tokens in 400 ms",
        "  dropped for lack of space: ahab, moby",
    ]
    assert recovery_lines(None) == []


async def test_cluster_reports_losses(terminal: Terminal) -> None:
    recovery = Recovery(
        epoch=2, lost_tokens=8, recovered_tokens=8, seconds=1.5, is_done=True, dropped_contexts=("ahab",)
    )
    terminal.engine.recovery, terminal.engine.losses = recovery, (LOSS,)
    [cluster] = await terminal.json("cluster")
    assert msgspec.convert(cluster["recovery"], Recovery) == recovery
    assert msgspec.convert(cluster["losses"], tuple[Loss, ...]) == (LOSS,)
    _, out, _ = await terminal.run("cluster")
    assert (
        "recovered 8 of 8 lost tokens in 1.5 s\n  dropped for lack of space: ahab\nrank 2 of epoch 1 on node b was"
        in out
    )


HALF = Recovering(8, 12_288, 65_536)
RECOVERING_LINE = "restoring keys and values: 12,288 of 65,536 tokens, 8 left for this answer"


@pytest.mark.parametrize("options", [(), ("--json",), ("--samples", "2")])
async def test_waiting_answer_is_reported_once_without_a_terminal(terminal: Terminal, options: tuple[str, ...]) -> None:
    ends = (engine_messages.Ended("length", 1, 0, 2, 0.0, 0.0, 0.0, sample) for sample in range(2))
    first, second = (engine_messages.Tokens(i, tokens(ids("ab")[i : i + 1])) for i in range(2))
    terminal.engine.answer = ()
    terminal.engine.script = (first, HALF, HALF, second, HALF, *ends)
    code, out, err = await terminal.run("generate", "--prompt", "x", *options)
    assert (code, err.splitlines().count(RECOVERING_LINE), "\x1b" in err) == (0, 1, False)
    assert "ab" in out or options == ("--json",)


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


async def test_recovery_of_own_tokens_is_reported_to_a_tenant(terminal: Terminal) -> None:
    terminal.engine.answer = ()
    terminal.engine.script = (Recovering(8, 0, 0), engine_messages.Ended("length", 1, 0, 2, 0.0, 0.0, 0.0, 0))
    _, _, err = await terminal.run("generate", "--prompt", "x")
    assert "restoring keys and values: 8 left for this answer" in err.splitlines()


def test_recovery_line_is_below_the_answer_on_a_terminal() -> None:
    screen = Screen()
    line = RecoveryLine(screen)
    line.hide()
    assert screen.getvalue() == ""
    line.show(HALF)
    line.show(Recovering(0, 65_536, 65_536))
    line.hide()
    line.hide()
    room, below = "\x1bD\x1bM", "\x1b7\r\n\x1b[K"
    shown = [
        f"{room}{below}{reported}\x1b8"
        for reported in (RECOVERING_LINE, "restoring keys and values: 65,536 of 65,536 tokens")
    ]
    assert screen.getvalue() == "".join([*shown, f"{below}\x1b8"])


def test_recovery_line_fits_the_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the cursor would return to the wrong line."""
    monkeypatch.setenv("COLUMNS", "20")
    screen = Screen()
    RecoveryLine(screen).show(HALF)
    assert f"\x1b[K{RECOVERING_LINE[:19]}\x1b8" in screen.getvalue()


def test_progress_bar_of_an_ingest_shows_the_recovery(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(None) as show:
        show(IngestProgress(phase="prefilling", total=9))
        show(IngestProgress(phase="recovering", processed=4, total=9, recovering=HALF))
    err = capsys.readouterr().err
    assert err.startswith("restoring")
    assert "12,288 of 65,536 tokens" in err
    with progress_bar(None) as show:
        show(IngestProgress(phase="recovering", processed=4, total=9, recovering=HALF))
        show(IngestProgress(phase="prefilling", processed=5, total=9))
    assert capsys.readouterr().err.startswith("reading")


async def test_dropped_context_is_reported_with_the_reason(terminal: Terminal) -> None:
    terminal.engine.contexts["moby"] = [1]
    terminal.engine.error = ContextLost("contexts/moby", "3 ranks have no room for it")
    code, out, err = await terminal.run("ask", "moby", "who?")
    assert (code, out, err) == (2, "", "error: contexts/moby was lost: 3 ranks have no room for it\n")
