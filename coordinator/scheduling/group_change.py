"""The scheduler's operations at a change of ranks, and during the recovery that follows. Pure."""

from coordinator.engine_messages import ContextDropped, Recovering
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.segments import SegmentStore
from coordinator.recovery.fault_score import BREAK_SCORE
from coordinator.recovery.recovery import RecoveryManager
from coordinator.recovery.remap import segment_layouts
from coordinator.recovery.restore import RestorePlanner
from coordinator.scheduling.deferral import Deferral
from coordinator.scheduling.job_recovery import JobRecovery
from longleaf.rank_protocol.group_messages import SegmentLayout


class GroupChangeOperations:
    """The part of a scheduler that handles the change of epochs."""

    segments: SegmentStore
    _deferral: Deferral
    _job_recovery: JobRecovery
    _recovery: RecoveryManager

    def roll_back(self, steps: tuple[int, ...] = (), suspicion: int = BREAK_SCORE) -> None:
        """Ends an epoch. Plans in flight are discarded and must not be committed. Nothing is scheduled until
        `change_ranks`. Answers later continue at their next token, documents after the last committed chunk.

        `steps` are those in which the epoch may have ended; empty if it ended outside a step. Their work gets the fault
        score `suspicion`: a job that breaks a second epoch ends. See `pop_outcomes`.
        """
        self._deferral.end()
        self._job_recovery.roll_back(steps, suspicion)

    def change_ranks(self, rank_mapping: RankMapping, *, may_grow: bool = False) -> None:
        """Continues with the ranks of another epoch, after `roll_back`. The ranks must receive `layout` before any
        plan.

        Contexts and jobs that no longer fit are dropped. If more ranks are expected (`may_grow`), they are dropped
        later by `shrink_to_fit`, or not at all if another epoch brings enough ranks. See `pop_dropped` and
        `pop_outcomes`."""
        self._job_recovery.change_ranks(rank_mapping, may_grow=may_grow)

    @property
    def is_confirmed(self) -> bool:
        """Whether no more ranks are expected."""
        return self._job_recovery.is_confirmed

    def shrink_to_fit(self) -> None:
        """Drops contexts and jobs that no longer fit, because no more ranks are expected."""
        self._deferral.end()
        self._job_recovery.shrink_to_fit()

    def layout(self) -> tuple[SegmentLayout, ...]:
        """The layout of all held segments, for ranks that have no plan yet."""
        return segment_layouts(self.segments)

    @property
    def is_rebalancing(self) -> bool:
        """Whether runs may move between ranks."""
        return self._recovery.is_rebalancing

    @property
    def restoring(self) -> RestorePlanner:
        """The planner of restores from storage. A caller that reports a result to it must call `schedule`
        afterwards."""
        return self._recovery.restoring

    @property
    def recovering(self) -> Recovering | None:
        """The progress of the recovery; None when nothing is lost."""
        return self._recovery.total

    def pop_dropped(self) -> list[ContextDropped]:
        """Removes and returns the contexts that were dropped."""
        return self._job_recovery.pop_dropped()
