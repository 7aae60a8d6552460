"""Snapshot requests to members, sent independently of steps, and their results."""

import asyncio
from collections.abc import Callable

from coordinator.cluster.control_socket import ControlSocket
from coordinator.cluster.member_registry import MemberRegistry
from coordinator.cluster.ports import MemberEvent, MemberLost
from longleaf.errors import DataLoss, LongleafError, RankLost, StorageUnavailable, Unavailable
from longleaf.rank_protocol.snapshots import Failure, Fetch, Fetched, Outcome, Save, Saved

Key = tuple[int, type[Outcome], int]
"""Member, kind and ticket."""


class SnapshotRequests:
    """Pending requests. A caller may be cancelled while it waits; its answer is then dropped."""

    def __init__(self, channel: ControlSocket, registry: MemberRegistry) -> None:
        self._channel = channel
        self._registry = registry
        self._waiting: dict[Key, asyncio.Future[Outcome]] = {}
        registry.subscribe(self._on_member_event)

    async def save(self, member: int, order: Save) -> Saved:
        """Raises as `Ranks.save`."""
        outcome = await self._send_order(member, order, Saved)
        assert isinstance(outcome, Saved)
        return outcome

    async def fetch(self, member: int, order: Fetch) -> None:
        """Raises as `Ranks.fetch`."""
        await self._send_order(member, order, Fetched)

    async def _send_order(self, member: int, order: Save | Fetch, kind: type[Outcome]) -> Outcome:
        one = self._registry.get(member)
        if one is None or one.loss_reason:
            raise rank_lost_error(member, None, one.loss_reason if one else "it is no longer a member")
        key = member, kind, order.ticket
        if key in self._waiting:
            raise ValueError(f"ticket {order.ticket} of member {member} is in use")
        answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send([member], order)
            outcome = await answer
        finally:
            del self._waiting[key]
        if outcome.failure is not None:
            raise error_of(order.name, outcome.failure)
        return outcome

    def on_outcome(self, message: Outcome) -> None:
        """Drops the answer if its caller was cancelled."""
        answer = self._waiting.get((message.member, type(message), message.ticket))
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _on_member_event(self, event: MemberEvent) -> None:
        if isinstance(event, MemberLost):
            self._fail(lambda member: member == event.member, rank_lost_error(event.member, event.rank, event.reason))

    def close(self) -> None:
        """Fails all pending requests: no answers will follow."""
        self._fail(lambda _: True, Unavailable("the service is stopping"))

    def _fail(self, is_meant: Callable[[int], bool], error: LongleafError) -> None:
        for (member, _, _), answer in self._waiting.items():
            if is_meant(member) and not answer.done():
                answer.set_exception(error)


def rank_lost_error(member: int, rank: int | None, reason: str) -> RankLost:
    """The error for a lost member. A member without a rank is reported by its member number."""
    return RankLost(member if rank is None else rank, reason)


def error_of(name: str, failure: Failure) -> LongleafError:
    """Error for a failed request about the object `name`."""
    match failure.kind:
        case "damaged":
            return DataLoss(name, failure.reason)
        case "unavailable":
            return StorageUnavailable(f"{name}: {failure.reason}")
        case "dropped":
            return Unavailable(f"{name}: {failure.reason}")
