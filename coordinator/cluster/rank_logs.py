"""Writes log records of ranks to the coordinator's log."""

import logging
import time
from collections.abc import Callable, Iterable

from coordinator.cluster.member import Member
from coordinator.cluster.member_registry import MemberRegistry
from coordinator.cluster.ports import MemberEvent, MemberLost
from coordinator.throttle import Throttle
from longleaf.rank_protocol.log_messages import MAX_TEXT_BYTES, Logged

MAX_AT_ONCE, PER_SECOND = 100, 2.0
"""Records of one rank that are logged at once, and then per second, so that a rank cannot flood the log."""
NO_RANK = -1
"""The rank of a member that is in no epoch yet."""
log = logging.getLogger(__package__)


class RankLogForwarder:
    """Logs records of members under the logger `coordinator.cluster`, with their level and the attributes `rank` (an
    int; NO_RANK for a member without a rank), `node` and `epoch`."""

    def __init__(self, registry: MemberRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._throttles: dict[int, Throttle] = {}
        """By member."""
        self._known: frozenset[str] | None = None
        """Notes that were already printed to the user; None before that."""
        registry.subscribe(self._watch)

    def skip_notes(self, notes: Iterable[str]) -> None:
        """Marks these notes as printed: records with the same text are not logged again."""
        self._known = frozenset(_cut(note) for note in notes)

    def log_records(self, member: Member, logged: Logged) -> None:
        """Logs the records of a member, up to its rate limit."""
        throttle = self._throttles.setdefault(member.number, Throttle(1 / PER_SECOND, MAX_AT_ONCE, self._clock))
        for record in logged.records:
            if record.is_note and (self._known is None or record.text in self._known):
                continue
            if not throttle.admit():
                continue
            self._log_omitted(member.number, member.node, throttle)
            text = f"{record.text}\n{record.traceback}" if record.traceback else record.text
            self._log(record.level, member.number, member.node, text)
        throttle.record_dropped(logged.num_dropped)

    def _log_omitted(self, number: int, node: str, throttle: Throttle) -> None:
        if num_dropped := throttle.pop_num_dropped():
            self._log(logging.WARNING, number, node, f"{num_dropped} log records dropped: too many per second")

    def _watch(self, event: MemberEvent) -> None:
        if isinstance(event, MemberLost) and (throttle := self._throttles.pop(event.member, None)) is not None:
            self._log_omitted(event.member, event.node, throttle)

    def _log(self, level: int, number: int, node: str, text: str) -> None:
        ranks = self._registry.ranks
        rank = ranks.index(number) if number in ranks else NO_RANK
        extra = {"rank": rank, "node": node, "epoch": self._registry.epoch}
        log.log(level, "%s: %s", f"member {number}" if rank == NO_RANK else f"rank {rank}", text, extra=extra)


def _cut(note: str) -> str:
    """The text of a record, truncated."""
    return note.encode(errors="backslashreplace")[:MAX_TEXT_BYTES].decode(errors="ignore")
