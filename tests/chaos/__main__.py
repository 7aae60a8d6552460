"""Coordinator with fault injection: `python -m tests.chaos FOLDER CONFIG` takes the argument of `python -m
coordinator` and puts probe sockets into FOLDER. The drafter proposes the known answers from FOLDER and is mostly right.
The faults are in tests.chaos.faults, the runner in tests.chaos.soak."""

import asyncio
import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import coordinator.__main__ as command
import coordinator.scheduling.scheduler
import coordinator.service
from coordinator.engine.engine import Engine
from coordinator.engine_messages import Tokens
from longleaf.rank_protocol.group_messages import SegmentLayout
from tests.chaos.entry import run_rank
from tests.chaos.points import AFTER_KEEP, BEFORE_KEEP, CALL, COMMIT, EVICT, PUBLISH, Points, Probe
from tests.chaos.snapshots import SnapshotProbe
from tests.chaos.views import Look
from tests.support.golden.knowing import KnowingDrafter

LOOK_SECONDS = 0.02
IDLE_SECONDS = 120.0
"""Limit for reaching the idle state after recovery, once all clients are gone."""
ANSWERS = "answers.json"
"""File in FOLDER with the tokens of each known answer."""
RIGHT = 0.7
"""Share of drafted tokens that are correct."""


def main(arguments: list[str]) -> int:
    for number in command.SIGNALS:
        signal.signal(number, command.exit_immediately)
    folder = Path(arguments[0])
    coordinator.scheduling.scheduler.Drafter = partial(make_drafter, folder)  # type: ignore[misc]
    command.worker_main = partial(run_rank, folder)
    coordinator.service.Engine = partial(ProbedEngine, folder)  # type: ignore[misc]
    return command.main(arguments[1])


def make_drafter(folder: Path, _max_rows: int, _max_drafts: int, block_size: int) -> KnowingDrafter:
    """Steps of models this small are too short for the real drafter to draft."""
    return KnowingDrafter(block_size, json.loads((folder / ANSWERS).read_bytes()), RIGHT)


class ProbedEngine(Engine):
    """An engine with fault points and a probe socket."""

    def __init__(self, folder: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._folder = folder
        self._points = Points()
        assert self._store.snapshots is not None
        self._snapshots = SnapshotProbe(self._store.snapshots, self._points)

    async def start(self):
        readies = await super().start()
        scheduler: Any = self._scheduler
        scheduler.commit = partial(self._commit, scheduler.commit)
        segments = scheduler.segments
        segments._begin_eviction = partial(self._pass, EVICT, segments._begin_eviction)
        segments.begin_reload = partial(self._pass, CALL, segments.begin_reload)
        store: Any = self._store
        store._commit = partial(self._keep, store._commit)
        look = partial(self._wait_idle, asyncio.get_running_loop())
        Probe(self._folder, {"arm": self._points.arm, "look": look}).start()
        return readies

    def _pass(self, point: str, call: Any, *arguments: object) -> None:
        self._points.reach(point)
        call(*arguments)

    def _commit(self, commit: Any, *arguments: object) -> Any:
        outcomes = commit(*arguments)
        self._points.reach(COMMIT)
        return outcomes

    async def _keep(self, keep: Any, change: object) -> None:
        self._points.reach(BEFORE_KEEP)
        await keep(change)
        self._points.reach(AFTER_KEEP)

    def _publish(self, scheduler: Any, outcomes: Any = ()) -> None:
        if any(isinstance(outcome, Tokens) for _, outcome in outcomes):
            self._points.reach(PUBLISH)
        super()._publish(scheduler, outcomes)

    def _wait_idle(self, loop: asyncio.AbstractEventLoop) -> Look:
        """Returns the idle engine's state to another thread. Raises TimeoutError, listing the pending work, if the
        engine does not become idle."""

        async def look() -> Look:
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    while self._pending_work():  # noqa: ASYNC110, storage work sends no notification
                        await asyncio.sleep(LOOK_SECONDS)
            except TimeoutError:
                raise TimeoutError(f"still to do: {self._pending_work()}") from None
            return self._look()

        return asyncio.run_coroutine_threadsafe(look(), loop).result()

    def _pending_work(self) -> dict[str, object]:
        """Pending work by name."""
        scheduler: Any = self._scheduler
        found: dict[str, object] = {
            "steps": len(self._steps),
            "waiting": scheduler.num_waiting,
            "running": scheduler.num_running,
            "recovering": scheduler.recovery.total,
            "is over": self._epochs.is_over,
            "may grow": self._epochs.may_grow,
            **self._snapshots.busy,
        }
        return {name: value for name, value in found.items() if value}

    def _look(self) -> Look:
        scheduler: Any = self._scheduler
        self.audit()
        segments = scheduler.segments
        layout = tuple(
            SegmentLayout(one.segment.id, one.segment.start, tuple(one.runs), one.window_runs)
            for one in segments.placements
            if one.segment.token_ids and one.is_reported
        )
        paths = {
            one.id: tuple((segment.id, start, end) for segment, start, end in one.path.parts())
            for one in scheduler.contexts.list()
        }
        return Look(layout, frozenset(segments._forgotten), paths, self._snapshots.records)


if __name__ == "__main__":
    _code = main(sys.argv[1:])
    for _number in command.SIGNALS:
        signal.signal(_number, signal.SIG_IGN)
    sys.exit(_code)
