"""Replaces lost members until too many replacements of a slot have failed."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.cluster.member_registry import MemberRegistry
from coordinator.cluster.ports import (
    Fleet,
    MemberEvent,
    MemberJoined,
    MemberLost,
    ReplacementAbandoned,
    ReplacementDelayed,
    ReplacementStarted,
)
from longleaf.config import EngineConfig
from longleaf.errors import StartError
from longleaf.formatting import human_seconds
from longleaf.rank_protocol.group_messages import Ready

MINUTE = 60.0
MAX_FAILED = 3
"""Consecutive replacements of a slot that may be lost before one becomes a rank."""
AGAIN_SECONDS = 5.0
"""Seconds between two attempts to use an unavailable slot."""


@dataclass
class Slot:
    """A slot for one member, with the configuration of its next member."""

    member: int
    config: EngineConfig
    index: int = 0
    """Its number among the slots."""
    num_failed: int = 0
    """Consecutive replacements that were lost before they had a rank."""
    has_rank: bool = True
    """Whether the member has been in an epoch."""
    reason: str = ""
    """Latest reported reason why there is no replacement yet."""
    task: asyncio.Task[None] | None = None

    @property
    def is_being_filled(self) -> bool:
        return self.task is not None and not self.task.done()


class ReplacementThrottle:
    """Delays replacements after losses: up to `max_losses` per minute are replaced at once."""

    def __init__(self, max_losses: int) -> None:
        self._max_losses = max_losses
        self._times = deque[float](maxlen=max_losses + 1)

    def record_loss(self, now: float) -> None:
        """A member was lost."""
        self._times.append(now)

    def delay(self, now: float) -> float:
        """Seconds until the losses of the last minute are within the limit; 0 if they are."""
        is_full = len(self._times) > self._max_losses
        return max(0.0, self._times[0] + MINUTE - now) if is_full else 0.0


class ReplacementSupervisor:
    """Replaces lost members. `readies` are the members of the first epoch. Needs a running event loop.

    `clock` returns seconds, `sleep` waits.
    """

    def __init__(
        self,
        registry: MemberRegistry,
        fleet: Fleet,
        config: EngineConfig,
        readies: Sequence[Ready],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._registry = registry
        self._fleet = fleet
        self._start_timeout = config.start_timeout
        self._clock = clock
        self._sleep = sleep
        self._throttle = ReplacementThrottle(config.max_losses_per_minute)
        self._slots = [Slot(ready.member, pinned(config, ready), index) for index, ready in enumerate(readies)]
        self._is_closed = False
        registry.attach_supervisor(self._on_event)
        for slot in self._slots:
            if registry.get(slot.member) is None:  # lost before this supervisor started
                self._fill(slot)

    def reset_slots(self) -> int:
        """Requests the abandoned replacements again; returns their number."""
        empty = [slot for slot in self._slots if self._registry.get(slot.member) is None and not slot.is_being_filled]
        for slot in empty:
            slot.num_failed = 0
            self._fill(slot)
        return len(empty)

    def _on_event(self, event: MemberEvent) -> None:
        match event:
            case MemberJoined():
                for slot in self._slots:
                    if slot.member == event.member:
                        slot.has_rank, slot.num_failed = True, 0
            case MemberLost() if not self._is_closed:
                self._throttle.record_loss(self._clock())
                for slot in self._slots:
                    if slot.member == event.member and not slot.is_being_filled:
                        self._note_failed(slot, event.reason)
                        self._fill(slot)
            case _:
                pass

    @staticmethod
    def _note_failed(slot: Slot, reason: str) -> None:
        """Counts a replacement that never became a rank."""
        if not slot.has_rank:
            slot.num_failed, slot.reason = slot.num_failed + 1, reason

    def _fill(self, slot: Slot) -> None:
        slot.task = asyncio.create_task(self._replace(slot))

    async def _replace(self, slot: Slot) -> None:
        """Returns when a replacement has loaded the model, or too many were lost before they had a rank."""
        while slot.num_failed < MAX_FAILED:
            await self._back_off(slot)
            number = await self._begin(slot)
            try:
                async with asyncio.timeout(self._start_timeout):
                    await self._registry.admit(number)
                slot.reason = ""
                return
            except TimeoutError:
                reason = f"did not load within {human_seconds(self._start_timeout)}"
            except StartError as error:
                reason = str(error)
            self._note_failed(slot, reason)
            self._registry.kill(number, reason)
            await self._registry.wait_killed()
        self._registry.publish(
            ReplacementAbandoned(
                slot.member,
                f"{MAX_FAILED} replacements were lost before they joined; latest reason: {slot.reason}",
            )
        )

    async def _back_off(self, slot: Slot) -> None:
        while delay := self._throttle.delay(self._clock()):
            self._registry.publish(ReplacementDelayed(slot.member, delay, "too many ranks were lost within a minute"))
            await self._sleep(delay)

    async def _begin(self, slot: Slot) -> int:
        """Waits until a process is started in the slot; returns its member number. Other tasks wait for the slot no
        longer than the start timeout."""
        began, is_reported = self._clock(), False
        while (number := await self._start(slot)) is None:
            if not is_reported and self._clock() - began >= self._start_timeout:
                is_reported = True
                absence = f"no slot for {human_seconds(self._start_timeout)}; a replacement starts when one is free"
                self._registry.publish(ReplacementAbandoned(slot.member, f"{absence}: {slot.reason}"))
            await self._sleep(AGAIN_SECONDS)
        return number

    async def _start(self, slot: Slot) -> int | None:
        """Starts a process in the slot; returns its member number, or None if that failed."""
        number, invitation = self._registry.invite(slot.index)
        try:
            await self._fleet.replace(slot.member, number, invitation, slot.config)
        except Exception as error:  # the cause, such as an unreachable machine, may be temporary
            self._registry.withdraw(number)
            reason = str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"
            if slot.reason != reason:  # log each reason once
                slot.reason = reason
                self._registry.publish(ReplacementDelayed(slot.member, AGAIN_SECONDS, slot.reason))
            return None
        self._registry.publish(ReplacementStarted(number, slot.member))
        slot.member, slot.has_rank = number, False
        return number

    async def close(self) -> None:
        """Stops replacing members."""
        self._is_closed = True
        self._registry.detach_supervisor()
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pinned(config: EngineConfig, ready: Ready) -> EngineConfig:
    """The configuration as the first start resolved it: next to running members, less memory would be free."""
    if config.kv_bytes is not None:
        return config
    kv_bytes, windows = ready.num_blocks * config.block_size * ready.bytes_per_token, ready.windows
    if windows is None:
        return replace(config, kv_bytes=kv_bytes, window_bytes=None)
    taken = windows.num_blocks * windows.block_size(config.block_size) * windows.bytes_per_token
    field = "state_bytes" if windows.is_state else "window_bytes"
    return replace(config, kv_bytes=kv_bytes + taken, **{field: taken})
