"""The latest losses of ranks and the state of their slots, for clients."""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from coordinator.cluster.ports import (
    MemberEvent,
    MemberJoined,
    MemberLost,
    ReplacementAbandoned,
    ReplacementDelayed,
    ReplacementStarted,
)
from longleaf.types import Loss, SlotState

MAX_REMEMBERED = 32


class LossHistory:
    """Losses and replacements of members. `wall_clock` returns the time of a loss in seconds since the Unix epoch."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._losses: dict[int, Loss] = {}
        """By member; in the order in which they were lost."""
        self._lost_before: dict[int, int] = {}
        """For each replacement that never had a rank, the member that it replaces."""
        self.num_lost = 0
        """Number of members lost so far; details are kept only for the latest ones."""

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The latest loss is last."""
        return tuple(self._losses.values())

    @property
    def is_filling(self) -> bool:
        """Whether a replacement of a lost member may still arrive."""
        return is_filling(self.losses)

    def take(self, event: MemberEvent) -> None:
        match event:
            case MemberLost():
                self._add(event)
            case ReplacementDelayed():
                self._set(event.lost, "waiting", refill_time=self._wall_clock() + event.seconds)
            case ReplacementStarted():
                self._lost_before[event.member] = event.lost
                self._set(event.lost, "filling")
            case ReplacementAbandoned():
                self._set(event.lost, "given_up", slot_reason=event.reason)
            case MemberJoined():
                self._set(self._lost_before.pop(event.member, None), "filled")

    def _add(self, event: MemberLost) -> None:
        self.num_lost += 1
        self._losses[event.member] = Loss(
            time=self._wall_clock(),
            member=event.member,
            rank=event.rank,
            epoch=event.epoch,
            node=event.node,
            reason=event.reason,
            slot="waiting",
        )
        if event.is_replaced:
            self._set(event.member, "waiting")
        else:
            self._set(event.member, "given_up", slot_reason="ranks are not replaced")
        if len(self._losses) > MAX_REMEMBERED:
            oldest = next(iter(self._losses))
            del self._losses[oldest]
            self._lost_before.pop(oldest, None)

    def _set(self, lost: int | None, slot: SlotState, refill_time: float | None = None, slot_reason: str = "") -> None:
        """Applies the state of a slot to all members lost there since it last had a rank."""
        while lost is not None:
            if (loss := self._losses.get(lost)) is not None:
                self._losses[lost] = replace(loss, slot=slot, refill_time=refill_time, slot_reason=slot_reason)
            lost = self._lost_before.get(lost)


def is_filling(losses: Iterable[Loss]) -> bool:
    """Whether a replacement is starting or will start."""
    return any(loss.slot in ("waiting", "filling") for loss in losses)
