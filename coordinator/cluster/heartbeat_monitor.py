"""Failure detection by heartbeats: silent members are killed, and the member that blocks a step is found."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from coordinator.cluster.member import Member
from longleaf.formatting import human_seconds
from longleaf.rank_protocol.member_messages import HEARTBEAT_SECONDS

if TYPE_CHECKING:
    from coordinator.cluster.member_registry import MemberRegistry

PATIENCE_SECONDS = 15.0
"""Minimum heartbeat timeout in seconds for a member that is loading the model, because libraries can block all of its
threads during the load.
"""
FRESH_SECONDS = 3 * HEARTBEAT_SECONDS
"""The time in seconds within which a healthy member reports its progress again."""


class HeartbeatMonitor:
    """Monitors the heartbeats of the members until `task` is cancelled. Needs a running event loop."""

    def __init__(self, members: "MemberRegistry", heartbeat_timeout: float) -> None:
        """A member without a heartbeat for `heartbeat_timeout` seconds is killed; one that loads, after at least
        PATIENCE_SECONDS."""
        self._members = members
        self._heartbeat_timeout = heartbeat_timeout
        self.task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Count the seconds since the last message of each member. Counting ticks, unlike comparing timestamps,
        tolerates a coordinator process that was itself suspended.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for member in self._members:
                if member.num_missed_heartbeats is None:
                    continue
                member.num_missed_heartbeats += 1
                limit = self._heartbeat_timeout if member.is_loaded else max(self._heartbeat_timeout, PATIENCE_SECONDS)
                if member.num_missed_heartbeats > limit:
                    self._members.kill(member.number, f"no heartbeat for {human_seconds(limit)}")

    async def find_straggler(self, numbers: Iterable[int], is_over: Callable[[], bool]) -> Member | None:
        """Return the member that blocks the others, among members that are all in the same step.

        Waits until each member has reported its progress again or its time is up. The result is the member with the
        oldest report, else the single member with the least progress. None when several members are equally behind, or
        when `is_over` becomes true meanwhile.
        """
        members = [member for number in numbers if (member := self._members.get(number)) is not None]
        heard = [member.num_heartbeats for member in members]
        with suppress(TimeoutError):
            async with asyncio.timeout(FRESH_SECONDS):
                await self._members.wait_until(
                    lambda: is_over() or all(one.num_heartbeats > old for one, old in zip(members, heard, strict=True))
                )
        return None if is_over() else straggler_of(members)


def straggler_of(members: Sequence[Member]) -> Member | None:
    silent = [member for member in members if member.is_silent]
    if silent:
        return max(silent, key=lambda member: (member.num_missed_heartbeats or 0, -member.number))
    least = min((member.progress for member in members), default=None)
    behind = [member for member in members if member.progress == least]
    return behind[0] if len(behind) == 1 < len(members) else None
