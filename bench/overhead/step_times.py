"""When each rank began and ended each step, on the clock that the processes of a machine share.

The ranks keep their times to themselves until they leave: noting them costs a step two looks at the clock, and no byte.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from longleaf.rank_protocol.group_messages import Join, KvLayout, Ready
from longleaf.rank_protocol.member_messages import Hello
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.rank_protocol.snapshots import Order, Outcome
from longleaf.rank_protocol.step import StepPlan
from workers.__main__ import live
from workers.rank_runtime import RankRuntime, StepHandle


class StepTime(NamedTuple):
    """Seconds."""

    began: float
    ended: float


Times = Mapping[int, StepTime]
"""Times of one rank, by step."""


class TimedRank:
    """A rank that writes the times of its steps to a file when it leaves."""

    def __init__(self, rank: RankRuntime, path: Path) -> None:
        self._rank = rank
        self._path = path
        self._times: dict[int, StepTime] = {}

    def make_hello(self) -> Hello:
        return self._rank.make_hello()

    def load(self, parts: Sequence[int] = ()) -> None:
        self._rank.load(parts)

    def hold(self, parts: Sequence[int]) -> int:
        return self._rank.hold(parts)

    def open_store(self) -> int:
        return self._rank.open_store()

    def join(self, join: Join) -> Ready:
        return self._rank.join(join)

    def start(self, plan: StepPlan) -> StepHandle:
        """Waits for the end of the step: on CPUs it is there by then."""
        began = time.monotonic()
        pending = self._rank.start(plan)
        pending.result()
        self._times[plan.step] = StepTime(began, time.monotonic())
        return pending

    def set_layout(self, layout: KvLayout) -> None:
        self._rank.set_layout(layout)

    def submit_order(self, order: Order, answer: Callable[[Outcome], None]) -> None:
        self._rank.submit_order(order, answer)

    @property
    def num_exchanges(self) -> int:
        return self._rank.num_exchanges

    def fence(self) -> None:
        self._rank.fence()

    def leave(self) -> None:
        self._rank.leave()

    def close(self) -> None:
        self._path.write_text(json.dumps(self._times))
        self._rank.close()


class TimedMain:
    """Entry of the process of a TimedRank, which writes to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, spec: RankSpec) -> None:
        from workers.rank import Rank

        live(spec, lambda spec: TimedRank(Rank(spec), _path(self._folder, spec.member)))


def read(folder: Path, world_size: int) -> list[Times]:
    """The times that the ranks wrote, in rank order."""
    found = [json.loads(_path(folder, rank).read_text()) for rank in range(world_size)]
    return [{int(step): StepTime(*times) for step, times in by_step.items()} for by_step in found]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


class Gap(NamedTuple):
    """Between the end of a step on the last rank and the beginning of the next one there; `period` goes from there to
    the end of the next one on its last rank. Seconds."""

    seconds: float
    period: float


def gaps(ranks: Sequence[Times], steps: Iterable[int]) -> list[Gap]:
    """One for every two of `steps` that follow each other."""
    wanted = set(steps)
    return [_gap(ranks, step) for step in sorted(wanted) if step + 1 in wanted]


def _gap(ranks: Sequence[Times], step: int) -> Gap:
    last = max(ranks, key=lambda times: times[step].ended)
    ended = last[step].ended
    return Gap(last[step + 1].began - ended, max(times[step + 1].ended for times in ranks) - ended)
