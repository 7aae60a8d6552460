"""The steps that ranks were told to do and have not answered."""

import asyncio
from collections import deque
from collections.abc import Callable

from coordinator.ranks.ports import Group
from longleaf.channel.step import StepPlan, StepResult


class Steps:
    """In the order in which they were begun, which is that of their answers. `on_answer` is called with each answer."""

    def __init__(self, on_answer: Callable[[], None]) -> None:
        self._on_answer = on_answer
        self._under_way: deque[tuple[StepPlan, asyncio.Task[StepResult]]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, group: Group, plan: StepPlan) -> None:
        """Tells the ranks."""

        async def step() -> StepResult:
            return await group.step(plan)

        task = asyncio.create_task(step())
        task.add_done_callback(lambda _: self._on_answer())
        self._under_way.append((plan, task))

    def take(self) -> tuple[StepPlan, StepResult] | None:
        """The next answer, if it is there. Raises what kept the ranks from answering."""
        if not self._under_way or not self._under_way[0][1].done():
            return None
        plan, task = self._under_way.popleft()
        return plan, task.result()

    async def abandon(self) -> None:
        """Nobody waits for their answers any more."""
        tasks = [task for _, task in self._under_way]
        self._under_way.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
