"""Transitions between epochs: detects the end of an epoch, forms the next one, and sends it the KV cache layout."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from coordinator.cluster.loss_history import is_replacing
from coordinator.cluster.ports import EpochEnd, Formation, Ranks
from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.recovery.fault_score import BREAK_SCORE, LOSS_SCORE
from coordinator.recovery.recovery_status import RecoveryStatus
from coordinator.scheduling.scheduler import Scheduler
from longleaf.errors import GroupFailed, RankLost, Unavailable
from longleaf.rank_protocol.group_messages import KvLayout

FIRST_EPOCH = 1
MAX_IDLE = 8
"""Number of consecutive epochs that broke before their first step after which the engine fails."""
MOVED_BYTES = 64 << 20
"""Maximum bytes of keys that one step moves from a rank to another: streams wait for it."""


@dataclass(frozen=True)
class Epoch:
    """The ranks and the block layout, from the time when the ranks are ready until one is lost or others join."""

    formation: Formation
    placer: BlockPlacer
    """Identical in all epochs."""

    @classmethod
    def first(cls, formation: Formation, block_size: int) -> Self:
        """The layout without any held keys."""
        readies = formation.readies
        return cls(formation, BlockPlacer([ready.num_blocks for ready in readies], block_size, readies[0].windows))

    @property
    def number(self) -> int:
        return self.formation.epoch

    @property
    def num_tokens(self) -> int:
        """Capacity of the pools of all ranks."""
        return self.placer.num_blocks.sharded * self.placer.block_size

    @property
    def max_moved_blocks(self) -> int:
        """Maximum blocks that one step moves."""
        block_bytes = self.placer.block_size * self.formation.readies[0].bytes_per_token
        return max(1, MOVED_BYTES // max(1, block_bytes))

    def rank_mapping(self, formation: Formation) -> RankMapping:
        """The ranks of `formation`, with their numbers in this epoch."""
        old = {member: rank for rank, member in enumerate(self.formation.members)}
        before = tuple(old.get(member) for member in formation.members)
        return RankMapping(formation.epoch, before, tuple(ready.num_blocks for ready in formation.readies))


class Epochs:
    """The epochs of an engine. `on_change` is called when the current epoch has ended, when more members can join, or
    when no replacement is pending any more.
    """

    def __init__(
        self,
        ranks: Ranks,
        recoveries: RecoveryStatus,
        clock: Callable[[], float],
        note: Callable[[int], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        """`note` must record the number of an epoch durably before the epoch begins."""
        self._note = note
        self._ranks = ranks
        self._recoveries = recoveries
        self._clock = clock
        self._current: Epoch | None = None
        self._on_change = on_change
        self._ended: asyncio.Task[EpochEnd] | None = None
        self._joinable: asyncio.Task[None] | None = None
        self._confirmed: asyncio.Task[None] | None = None
        self._num_idle = 0
        """Consecutive epochs that broke before a step was answered."""
        self._num_answered = 0
        """Steps answered before the current epoch."""
        self.missing_weights = 0.0
        """The fraction of the weights that no rank holds, while the next epoch forms; see `Ranks.missing_weights`."""

    @property
    def is_begun(self) -> bool:
        """Whether the first epoch has formed."""
        return self._current is not None

    @property
    def current(self) -> Epoch:
        assert self._current is not None
        return self._current

    async def start(self, block_size: int, number: int = FIRST_EPOCH) -> Epoch:
        """Form the first epoch, with this number. Raises StartError, ModelRefused or RankLost."""
        self._current = Epoch.first(await self._ranks.start(number), block_size)
        return self._current

    def watch(self) -> None:
        """Start to call `on_change` for the current epoch."""
        self.unwatch()
        self._ended = asyncio.create_task(self._wait_ended(self.current.formation))
        self._joinable = asyncio.create_task(self._ranks.wait_joinable())
        self._confirmed = asyncio.create_task(self._ranks.wait_ready())
        for task in (self._ended, self._joinable, self._confirmed):
            task.add_done_callback(lambda _: self._on_change())

    @staticmethod
    async def _wait_ended(formation: Formation) -> EpochEnd:
        return await formation.group.wait_ended()

    def unwatch(self) -> None:
        """Stop calling `on_change`."""
        for task in (self._ended, self._joinable, self._confirmed):
            if task is not None:
                task.cancel()

    @property
    def is_over(self) -> bool:
        """Whether the current epoch has ended."""
        return self._ended is not None and self._ended.done()

    @property
    def may_grow(self) -> bool:
        """Whether more members can join once no step is running."""
        return self._joinable is not None and self._joinable.done()

    def shrink_to_fit(self, scheduler: Scheduler) -> None:
        """Drop the contexts that the ranks cannot hold, once no replacement is pending."""
        if self._confirmed is not None and self._confirmed.done() and not scheduler.job_recovery.is_confirmed:
            scheduler.job_recovery.shrink_to_fit()

    async def ended(self) -> EpochEnd:
        """Return the reason why the current epoch ended, once it has."""
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def form_next(self, scheduler: Scheduler, notify: Callable[[], None]) -> None:
        """Form the next epoch from the available members: after a loss, or when more can join and no step is running.

        `notify` is called when streams have new events. Raises RankLost when no member is left, and Unavailable when
        consecutive epochs fail without a step.
        """
        lost_at, is_loss = self._clock(), self.is_over
        if is_loss:
            end = await self.ended()
            self._check_progress(end, scheduler)
            scheduler.job_recovery.roll_back(end.steps, LOSS_SCORE if isinstance(end.error, RankLost) else BREAK_SCORE)
        else:
            scheduler.job_recovery.roll_back()
        self.missing_weights = self._ranks.missing_weights
        if self.missing_weights:
            scheduler.job_recovery.report_missing_weights(self.missing_weights)
        notify()
        while True:
            await self._note(number := self.current.number + 1)
            formation = await self._ranks.form(number)
            if formation.epoch != number:  # it took more than one attempt
                await self._note(formation.epoch)
            rank_mapping = self.current.rank_mapping(formation)
            self._current = Epoch(formation, self.current.placer)
            scheduler.job_recovery.change_ranks(rank_mapping, may_grow=self.may_yet_grow)
            if is_loss or scheduler.recovery.total is not None:  # ranks may have been lost while others joined
                self._recoveries.begin(formation.epoch, lost_at)
            with suppress(RankLost, GroupFailed):
                await formation.group.send_layout(KvLayout(formation.epoch, scheduler.segments.layout()))
                break
            scheduler.job_recovery.roll_back()
        self.missing_weights = 0.0
        self.watch()
        notify()

    def _check_progress(self, end: EpochEnd, scheduler: Scheduler) -> None:
        """Raises Unavailable after MAX_IDLE consecutive epochs that broke before their first step although all ranks
        are alive: they would break forever. A break in a step is attributed to the work of that step, which is dropped.
        """
        is_idle = isinstance(end.error, GroupFailed) and not end.steps
        is_idle = is_idle and scheduler.num_steps == self._num_answered
        self._num_idle, self._num_answered = self._num_idle + 1 if is_idle else 0, scheduler.num_steps
        if self._num_idle >= MAX_IDLE:
            raise Unavailable(f"{MAX_IDLE} epochs in a row ended without a step; latest error: {end.error}")

    @property
    def may_yet_grow(self) -> bool:
        """Whether the replacement of a lost rank is pending."""
        return is_replacing(self._ranks.losses)
