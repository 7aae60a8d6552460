"""Steps that were sent to the ranks and have no result yet."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from longleaf.rank_protocol.step import Decode, StepPlan, StepResult

if TYPE_CHECKING:
    from coordinator.cluster.groups.group import RankGroup

MAX_GAP = 0.01
"""Maximum seconds between two consecutive steps. After a longer gap, the engine is assumed to have been idle."""


@dataclass(slots=True)
class InflightStep:
    """A step that was sent."""

    plan: StepPlan
    result: "asyncio.Future[StepResult]"
    is_ahead: bool
    """Whether another step was running when this one was sent."""
    ended: float = 0.0


class StepGap(NamedTuple):
    """The gap between two decode steps."""

    seconds: float
    is_ahead: bool
    """Whether the second step was sent before the result of the first arrived."""


class StepCompletion(NamedTuple):
    """A finished step: its plan and its result."""

    plan: StepPlan
    result: StepResult
    gap: StepGap | None
    """The gap between the previous step and this one, if both were decode steps and consecutive."""


class InflightSteps:
    """Steps in the order in which they were sent, which is the order of their results. `on_answer` is called for each
    result."""

    def __init__(self, on_answer: Callable[[], None], clock: Callable[[], float]) -> None:
        self._on_answer = on_answer
        self._clock = clock
        self._under_way: deque[InflightStep] = deque()
        self._before: InflightStep | None = None
        """The latest step that was removed."""

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, group: "RankGroup", plan: StepPlan) -> None:
        """Sends the plan to the ranks."""
        step = InflightStep(plan, asyncio.ensure_future(group.step(plan)), bool(self._under_way))
        step.result.add_done_callback(lambda _: self._end(step))
        self._under_way.append(step)

    def _end(self, step: InflightStep) -> None:
        step.ended = self._clock()
        self._on_answer()

    def pop_completed(self) -> StepCompletion | None:
        """Returns the next result, if there is one. Raises the error that prevented it."""
        if not self._under_way or not self._under_way[0].result.done():
            return None
        step = self._under_way.popleft()
        result = step.result.result()
        gap, self._before = self._gap(step, result), step
        return StepCompletion(step.plan, result, gap)

    def _gap(self, step: InflightStep, result: StepResult) -> StepGap | None:
        before = self._before
        if before is None or before.plan.step + 1 != step.plan.step or result.seconds <= 0:
            return None
        if not isinstance(before.plan.work, Decode) or not isinstance(step.plan.work, Decode):
            return None
        seconds = step.ended - before.ended - result.seconds
        return StepGap(seconds, step.is_ahead) if 0 < seconds < MAX_GAP else None

    async def abandon(self) -> None:
        """Discards the pending results."""
        results = [step.result for step in self._under_way]
        self._under_way.clear()
        for result in results:
            result.cancel()
        await asyncio.gather(*results, return_exceptions=True)
