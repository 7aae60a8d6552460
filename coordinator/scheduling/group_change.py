"""What a scheduler does when the ranks change, and until all that was lost is held again. Pure."""

from coordinator.engine_messages import ContextDropped, Recovering
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.segments import SegmentStore
from coordinator.recovery.fault_score import BREAK
from coordinator.recovery.recovery import RecoveryManager
from coordinator.recovery.remap import lay_out
from coordinator.recovery.restore import RestorePlanner
from coordinator.scheduling.job_recovery import JobRecovery
from longleaf.rank_protocol.group_messages import SegmentLayout


class AcrossEpochs:
    """The part of a scheduler that outlives its epochs."""

    segments: SegmentStore
    _healing: JobRecovery
    _recovery: RecoveryManager

    def roll_back(self, steps: tuple[int, ...] = (), suspicion: int = BREAK) -> None:
        """The epoch is over. Plans under way never were, and may not be committed; nothing is scheduled until
        `change_ranks`. Answers go on later at their next token, documents after the last chunk that was read.

        `steps` are those in one of which that happened, if it did in one. Their work is suspected so much: a job that
        breaks a second one ends. See `drain`.
        """
        self._healing.roll_back(steps, suspicion)

    def change_ranks(self, ranking: RankMapping, *, may_grow: bool = False) -> None:
        """Goes on with the ranks of another epoch, after `roll_back`. They must be told `layout` before any plan.

        What they cannot hold is given up, unless others are to come (`may_grow`): in another epoch, or else `settle`
        says that they will not. See `take_given_up`, and `drain`.
        """
        self._healing.change_ranks(ranking, may_grow=may_grow)

    @property
    def is_settled(self) -> bool:
        """No more ranks are to come."""
        return self._healing.is_settled

    def settle(self) -> None:
        """No more ranks are to come: what these cannot hold is given up."""
        self._healing.settle()

    def layout(self) -> tuple[SegmentLayout, ...]:
        """All that is held, for ranks that are told so before they get any plan."""
        return lay_out(self.segments)

    @property
    def is_moving(self) -> bool:
        """Runs may go from rank to rank."""
        return self._recovery.is_moving

    @property
    def restoring(self) -> RestorePlanner:
        """What comes back from storage. Whoever tells it something schedules then."""
        return self._recovery.restoring

    @property
    def recovering(self) -> Recovering | None:
        """How far all that was lost is held again; None when it is."""
        return self._recovery.total

    def take_given_up(self) -> list[ContextDropped]:
        """Contexts that were given up; each is told once."""
        return self._healing.take_given_up()
