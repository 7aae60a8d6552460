"""Recovery after a loss, until all keys are recovered and every rank holds its share. Pure."""

from collections.abc import Callable, Iterable, Sequence

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.lost_ranges import LostRanges
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.recovery.fault_score import BREAK_SCORE
from coordinator.recovery.rebalance import Rebalancer
from coordinator.recovery.recompute import RecomputePlanner, RecoveryFailed
from coordinator.recovery.remap import begin_reload, remap
from coordinator.recovery.restore import RestorePlanner, none_stored
from longleaf.rank_protocol.step import Move, Prefill, Restore, Work
from longleaf.types import Recovering

MOVED_BLOCKS = 64
"""Maximum number of blocks that a plan moves, unless the caller computes it from the block size."""


class RecoveryManager:
    """Plans recovery steps, one at a time: lost keys are restored from storage or recomputed, then runs move to new
    ranks."""

    def __init__(
        self,
        placer: BlockPlacer,
        segments: SegmentStore,
        max_moved_blocks: int = MOVED_BLOCKS,
        is_stored: Callable[[int], bool] = none_stored,
    ) -> None:
        """`is_stored`: see RestorePlanner."""
        self._placer = placer
        self._placements = segments.placements
        self._segments = segments
        self.restoring = RestorePlanner(placer, segments, is_stored)
        self._recompute = RecomputePlanner(placer, segments, self.restoring.has)
        self._rebalance = Rebalancer(placer, segments, max_moved_blocks)
        self._work: Prefill | Move | Restore | None = None
        self._losses: dict[int, LostRanges] = {}
        """All lost ranges since everything was last held, by segment id."""
        self.is_over = True
        """Nothing is lost, and every rank holds its share."""

    @property
    def is_under_way(self) -> bool:
        """A recovery plan is under way."""
        return self._work is not None

    @property
    def is_rebalancing(self) -> bool:
        """Runs may move between ranks."""
        return not self._rebalance.is_over

    @property
    def needs_windows(self) -> bool:
        """Some ranks lack windows, and must receive them before they can take part in any step."""
        return bool(self._rebalance.bare)

    @property
    def is_suspected(self) -> bool:
        """The fault score of a lost segment requires that it is recomputed with nothing else under way."""
        return any(
            placement.loss.suspicion >= BREAK_SCORE for placement in self._placements.with_losses if placement.loss
        )

    @property
    def is_reserved(self) -> bool:
        """Blocks are reserved for all lost ranges."""
        return self._recompute.is_reserved

    @property
    def num_lost(self) -> int:
        """Number of lost tokens."""
        return sum(placement.loss.num_tokens for placement in self._placements.with_losses if placement.loss)

    @property
    def num_scratch(self) -> BlockCount:
        """Blocks that are needed during recomputation in addition to those of the segments."""
        return self._recompute.num_scratch

    @property
    def num_reserved(self) -> BlockCount:
        """Reserved blocks that belong to no segment."""
        return self._recompute.num_reserved

    @property
    def frontiers(self) -> list[tuple[TokenPath, int]]:
        """Positions on paths at which windows are held to recompute the tokens from there on."""
        found = [(placement.segment.path, placement.loss) for placement in self._placements.with_losses]
        return [(path, loss.front) for path, loss in found if loss is not None and loss.front is not None]

    # --- change of epoch ---

    def undo(self, ended: Sequence[object], suspicion: int) -> SegmentPlacement | None:
        """Reverts the plan under way. Returns the segment that it recomputed, if the epoch ended, certainly or
        possibly, in this work."""
        is_suspected, is_certain = any(work is self._work for work in ended), len(ended) == 1
        self._work = None
        amount = suspicion if is_suspected else 0
        recomputed = self._recompute.undo(amount, is_certain=is_certain) if self._recompute.is_under_way else None
        self.restoring.undo(has_broken=amount >= BREAK_SCORE)
        if self._rebalance.is_under_way:
            self._rebalance.undo(has_broken=amount >= BREAK_SCORE and is_certain)
        return recomputed if is_suspected else None

    def fail(self) -> SegmentPlacement | None:
        """Reverts the plan under way, whose results are unusable. Returns the segment that it recomputed, or None if
        nothing needs it any more."""
        self._work = None
        return self._recompute.undo(0, is_certain=True)

    def change_ranks(self, rank_mapping: RankMapping) -> None:
        """Moves the placements to the ranks of the next epoch. No other reservations may exist."""
        assert self._work is None
        bare = self._rebalance.bare | set[int]()
        self._recompute.clear_reservations()
        first = rank_mapping.before[0]
        has_windows = first is not None and first not in bare and not self._rebalance.is_stuck
        remap(self._placer, self._segments, rank_mapping, has_windows=has_windows)
        self._rebalance.change_ranks(rank_mapping.after, rank_mapping.newcomers, has_windows=has_windows)
        self._losses = {
            placement.segment.id: placement.loss for placement in self._placements.with_losses if placement.loss
        }
        self.is_over = False

    def begin_reload(self, evicted: Sequence[SegmentPlacement]) -> None:
        """Starts the reload of evicted segments. Each must come after the segments that it continues."""
        begin_reload(self._placer, self._segments, evicted)
        self._losses |= {placement.segment.id: placement.loss for placement in evicted if placement.loss}
        self.is_over = self.is_over and not evicted

    def reserve_lost(self, paths: Sequence[TokenPath]) -> None:
        """Reserves blocks for lost segments as far as possible, first for those on `paths`, and orders the fetches that
        are possible then."""
        if not self.is_reserved:
            self._recompute.reserve_lost(paths)
        self.restoring.resume(paths)

    def num_unreserved(self, path: TokenPath) -> BlockCount:
        """Blocks that must be reserved before the lost keys of a path can be recomputed."""
        return self._recompute.num_unreserved(path)

    # --- plans ---

    def plan(self, paths: Iterable[TokenPath], size: int) -> Prefill | Move | Restore | None:
        """The next plan, with chunks of up to `size` tokens; None when nothing can be done now. Raises
        RecoveryFailed."""
        assert self._work is None
        if self.needs_windows:
            self._work = self._rebalance.next_windows()
        if self._work is None:
            self._work = self.restoring.plan() or self._recompute.plan(paths, size) or self._rebalance.plan()
        return self._work

    def owns(self, work: Work) -> bool:
        """Whether this is the recovery plan under way."""
        return self._work is work

    def commit(self) -> SegmentPlacement | None:
        """The plan under way is complete. Returns the segment with restored tokens, or None if there is none or nothing
        needs it any more. Raises RecoveryFailed."""
        self._work, segment = None, self.restoring.under_way or self._recompute.under_way
        if segment is None:
            self._rebalance.commit()
            return None
        try:
            return self.restoring.commit() if self.restoring.is_under_way else self._recompute.commit()
        except Exception as error:
            if self._recompute.is_under_way:
                self._recompute.undo(0, is_certain=True)
            raise RecoveryFailed(segment) from error

    def check_complete(self) -> None:
        """Checks whether recovery is complete, and releases the blocks reserved for recomputation once nothing is
        lost."""
        if self._work is None and self._placements.is_whole:
            self._losses.clear()
            self._recompute.release_scratch()
            self.is_over = self._rebalance.is_over

    # --- progress ---

    def progress(self, path: TokenPath) -> Recovering | None:
        """The progress of recovery and the number of lost tokens of a path; None when the whole path is held."""
        num_lost = self._placements.num_lost(path)
        return self._reported(num_lost) if num_lost else None

    @property
    def total(self) -> Recovering | None:
        """The progress of the whole recovery; None when nothing is lost."""
        return None if self._placements.is_whole else self._reported(self.num_lost)

    def _reported(self, num_lost: int) -> Recovering:
        total = sum(end - start for loss in self._losses.values() for start, end in loss.ranges)
        return Recovering(num_lost, total - self.num_lost, total)
