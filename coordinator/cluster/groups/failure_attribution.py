"""Determines the failed member when an epoch ends and several members report errors at once."""

import asyncio
from collections.abc import Callable, Sequence

from coordinator.cluster.ports import EpochEnd
from longleaf.errors import GroupFailed, LongleafError, RankLost

GRACE_SECONDS = 0.5
"""Seconds during which further reports are collected, if the first one does not identify the dead rank. When one rank
dies, its peers raise errors, often before the fleet detects the death. A rank that raises an error leaves the group, so
its peers may consider it dead before its own report arrives."""


class FailureCollector:
    """Collects reports about the members of one epoch, in rank order, and sets the future `verdict` once.

    `kill(member, reason)` must end the member's process and then cause a call of `record_exit`. `under_way` returns the
    candidates for the step that the ranks are executing.
    """

    def __init__(
        self, members: Sequence[int], kill: Callable[[int, str], None], under_way: Callable[[], tuple[int, ...]]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.members = tuple(members)
        self._kill = kill
        self._under_way = under_way
        self._failed: dict[int, str] = {}
        self._broken: dict[int, tuple[int, str]] = {}
        """Step and reason."""
        self._blamed: dict[int, str] = {}
        self._accusers = set[int]()
        """Members that reported another one dead."""
        self._is_gathering = False
        self._step: int | None = None
        """The step whose deadline has passed, if that is the reason for a kill."""
        self.verdict: asyncio.Future[EpochEnd] = self._loop.create_future()

    def record_exit(self, member: int, reason: str) -> None:
        """The member's process has ended, and the member sent no report. Sets the verdict."""
        if member in self.members:
            self._conclude_lost(member, reason)

    def record_failure(self, member: int, reason: str, blamed: int | None = None) -> None:
        """The member reported its own end, and no exit follows; `blamed` is the rank whose death caused it, if any."""
        if member in self.members:
            self._failed.setdefault(member, reason)
            self._record_blame(member, reason, blamed)

    def record_group_failure(self, member: int, step: int, reason: str, blamed: int | None = None) -> None:
        """The member is alive and reported that the epoch has ended for it."""
        self._broken.setdefault(member, (step, reason))
        self._record_blame(member, reason, blamed)

    def record_slow_step(self, step: int) -> None:
        """The deadline of this step has passed, and the member that blocks it is about to be killed."""
        self._step = step

    def has_answered(self, member: int) -> bool:
        """Whether the member reported that the epoch has ended for it."""
        return member in self._broken

    @property
    def is_suspected(self) -> bool:
        """Whether a report has arrived, so that the verdict is set or will be. Later results of ranks are ignored."""
        return self._is_gathering or self.verdict.done()

    def _record_blame(self, member: int, reason: str, blamed: int | None) -> None:
        if blamed is not None and self.members[blamed] != member:
            self._blamed.setdefault(self.members[blamed], reason)
            self._accusers.add(member)
        if not self.is_suspected:
            self._is_gathering = True
            self._loop.call_later(GRACE_SECONDS, self._decide)

    def _decide(self) -> None:
        """Sets the verdict. Members that others reported dead come first, then members that reported their own end, in
        the order of the reports. A member that others reported dead and that has sent no report itself is killed,
        because the others cannot reach it. If all members are alive, the cause is a member that blames no other."""
        if self.verdict.done():
            return
        gone = [member for member in self._blamed if member not in self._broken]
        if silent := [member for member in gone if member not in self._failed]:
            for member in silent:
                self._kill(member, self._blamed[member])
        elif gone or self._failed:
            member = (gone or list(self._failed))[0]
            self._conclude_lost(member, self._failed[member])
        else:
            member = next((one for one in self._broken if one not in self._accusers), next(iter(self._broken)))
            step, reason = self._broken[member]
            self.conclude(GroupFailed(f"rank {self.members.index(member)}: {reason}"), steps_of(step))

    def _conclude_lost(self, member: int, reason: str) -> None:
        step = self._step or next((step for step, _ in self._broken.values()), 0)
        self.conclude(RankLost(self.members.index(member), reason), steps_of(step) or self._under_way())

    def conclude(self, error: LongleafError, steps: tuple[int, ...] = ()) -> None:
        """Sets the verdict, unless it is already set."""
        if not self.verdict.done():
            self.verdict.set_result(EpochEnd(error, steps))


def steps_of(step: int) -> tuple[int, ...]:
    """The step as a tuple; empty for 0, which ranks report before their first step."""
    return (step,) if step else ()
