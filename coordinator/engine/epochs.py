"""From one epoch to the next: what ends one, who the ranks are then, and what they must be told."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from coordinator.cluster.loss_history import is_filling
from coordinator.cluster.ports import EpochEnd, Formation, Ranks
from coordinator.engine.epoch import Epoch
from coordinator.engine.recovery_status import RecoveryStatus
from coordinator.recovery.fault_score import BREAK, LOSS
from coordinator.scheduling.scheduler import Scheduler
from longleaf.errors import GroupFailed, RankLost, Unavailable
from longleaf.rank_protocol.group_messages import KvLayout

FIRST_EPOCH = 1
MAX_IDLE = 8
"""Epochs one after the other that may break before their first step."""


class Epochs:
    """The epochs of an engine. `on_change` is called when the current one has ended, when others could join, or
    when no others will."""

    def __init__(
        self,
        ranks: Ranks,
        recoveries: RecoveryStatus,
        clock: Callable[[], float],
        note: Callable[[int], Awaitable[None]],
    ) -> None:
        """`note` keeps the number of an epoch before it begins."""
        self._note = note
        self._ranks = ranks
        self._recoveries = recoveries
        self._clock = clock
        self._current: Epoch | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._ended: asyncio.Task[EpochEnd] | None = None
        self._joinable: asyncio.Task[None] | None = None
        self._settled: asyncio.Task[None] | None = None
        self._num_idle = 0
        """Epochs one after the other that broke before a step was answered."""
        self._num_answered = 0
        """Steps that were, before the current one."""

    @property
    def is_begun(self) -> bool:
        """Whether there was a first one."""
        return self._current is not None

    @property
    def current(self) -> Epoch:
        assert self._current is not None
        return self._current

    async def start(self, block_size: int, number: int = FIRST_EPOCH) -> Epoch:
        """The first epoch, of this number. Raises StartError, ModelRefused or RankLost."""
        self._current = Epoch.first(await self._ranks.start(number), block_size)
        return self._current

    def watch(self, on_change: Callable[[], None]) -> None:
        """From here on `on_change` is called."""
        self._on_change = on_change
        self._watch()

    def _watch(self) -> None:
        self.unwatch()
        self._ended = asyncio.create_task(self._wait_ended(self.current.formation))
        self._joinable = asyncio.create_task(self._ranks.wait_joinable())
        self._settled = asyncio.create_task(self._ranks.wait_settled())
        for task in (self._ended, self._joinable, self._settled):
            task.add_done_callback(lambda _: self._on_change())

    @staticmethod
    async def _wait_ended(formation: Formation) -> EpochEnd:
        return await formation.group.wait_ended()

    def unwatch(self) -> None:
        """Nobody wants to know any more."""
        for task in (self._ended, self._joinable, self._settled):
            if task is not None:
                task.cancel()

    @property
    def is_over(self) -> bool:
        """The ranks do no more steps."""
        return self._ended is not None and self._ended.done()

    @property
    def may_grow(self) -> bool:
        """Others could join as soon as no step is under way."""
        return self._joinable is not None and self._joinable.done()

    def settle(self, scheduler: Scheduler) -> None:
        """Has what the ranks cannot hold given up, once nobody is to come any more."""
        if self._settled is not None and self._settled.done() and not scheduler.is_settled:
            scheduler.settle()

    async def ended(self) -> EpochEnd:
        """Why the current one is over, once it is."""
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def follow(self, scheduler: Scheduler, tell: Callable[[], None]) -> None:
        """Goes on with those that are there: after a loss, or when others could join and nothing is under way.

        `tell` is called when streams must be told something. Raises RankLost when nobody is left, and Unavailable
        when epochs break one after the other without a step.
        """
        lost_at, is_loss = self._clock(), self.is_over
        if is_loss:
            end = await self.ended()
            self._check_progress(end, scheduler)
            scheduler.roll_back(end.steps, LOSS if isinstance(end.error, RankLost) else BREAK)
        else:
            scheduler.roll_back()
        tell()
        while True:
            await self._note(number := self.current.number + 1)
            formation = await self._ranks.form(number)
            if formation.epoch != number:  # it took more than one try
                await self._note(formation.epoch)
            ranking = self.current.ranking(formation)
            self._current = Epoch(formation, self.current.placer)
            scheduler.change_ranks(ranking, may_grow=self.may_yet_grow)
            if is_loss or scheduler.recovering is not None:  # some may have been lost while others came
                self._recoveries.begin(formation.epoch, lost_at)
            with suppress(RankLost, GroupFailed):
                await formation.group.lay_out(KvLayout(formation.epoch, scheduler.layout()))
                break
            scheduler.roll_back()
        self._watch()
        tell()

    def _check_progress(self, end: EpochEnd, scheduler: Scheduler) -> None:
        """Ranks that live, and break before their first step, would do so for ever: raises Unavailable. What breaks in
        a step is the fault of its work, which is given up."""
        is_idle = isinstance(end.error, GroupFailed) and not end.steps
        is_idle = is_idle and scheduler.num_answered == self._num_answered
        self._num_idle, self._num_answered = self._num_idle + 1 if is_idle else 0, scheduler.num_answered
        if self._num_idle >= MAX_IDLE:
            raise Unavailable(f"{MAX_IDLE} epochs ended one after the other without a step; the last: {end.error}")

    @property
    def may_yet_grow(self) -> bool:
        """The place of a lost rank is being filled."""
        return is_filling(self._ranks.losses)
