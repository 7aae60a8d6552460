"""What follows a loss, until all is held again and everybody holds a share. Pure."""

from collections.abc import Iterable, Sequence

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.lost_ranges import LostRanges
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.recovery.fault_score import BREAK
from coordinator.recovery.rebalance import Rebalancer
from coordinator.recovery.recompute import RecomputePlanner, RecoveryFailed
from coordinator.recovery.remap import call, regroup
from coordinator.recovery.restore import RestorePlanner
from longleaf.rank_protocol.step import Move, Prefill, Restore, Work
from longleaf.runs import Run
from longleaf.types import Recovering

MOVED_BLOCKS = 64
"""Blocks that a plan moves at most unless the caller knows how large they are."""


class RecoveryManager:
    """Plans of its own, one at a time: what is lost comes back from storage, or is read again; then runs move to those
    that came new."""

    def __init__(self, placer: BlockPlacer, segments: SegmentStore, max_moved_blocks: int = MOVED_BLOCKS) -> None:
        self._placer = placer
        self._holdings = segments.holdings
        self._segments = segments
        self.restoring = RestorePlanner(placer, segments)
        self._rereading = RecomputePlanner(placer, segments, self.restoring.has)
        self._moving = Rebalancer(placer, segments, max_moved_blocks)
        self._work: Prefill | Move | Restore | None = None
        self._losses: dict[int, LostRanges] = {}
        """All that was lost since everything was held, by segment."""
        self.is_over = True
        """Nothing is lost, and everybody holds its share."""

    @property
    def is_under_way(self) -> bool:
        """A plan of it is."""
        return self._work is not None

    @property
    def is_moving(self) -> bool:
        """Runs may go from rank to rank."""
        return not self._moving.is_over

    @property
    def is_bare(self) -> bool:
        """There are ranks that must be told windows before they can take part in any step."""
        return bool(self._moving.bare)

    @property
    def is_suspected(self) -> bool:
        """Something that is lost is to be read again with nothing else under way."""
        return any(holding.loss.suspicion >= BREAK for holding in self._holdings.lossy if holding.loss)

    @property
    def is_promised(self) -> bool:
        """All that is lost has blocks promised for it."""
        return self._rereading.is_promised

    @property
    def num_lost(self) -> int:
        """Tokens whose keys nobody holds."""
        return sum(holding.loss.num_tokens for holding in self._holdings.lossy if holding.loss)

    @property
    def num_rolling(self) -> BlockCount:
        """Blocks that are needed as long as tokens are read again, besides those of all segments."""
        return self._rereading.num_rolling

    @property
    def num_promised(self) -> BlockCount:
        """Blocks that are promised for no segment in particular."""
        return self._rereading.num_promised

    @property
    def arriving(self) -> Iterable[Run]:
        """Runs that a plan under way writes."""
        return (run for holding in self._holdings for run in holding.arriving)

    @property
    def fronts(self) -> list[tuple[TokenPath, int]]:
        """Places on paths whose windows are held so that tokens can be read again from there on."""
        found = [(holding.segment.path, holding.loss) for holding in self._holdings.lossy]
        return [(path, loss.front) for path, loss in found if loss is not None and loss.front is not None]

    # --- the change ---

    def undo(self, ended: Sequence[object], suspicion: int) -> SegmentPlacement | None:
        """What is under way never was. Gives the segment that it read again, if the epoch ended in that work, or in
        that or another one."""
        is_suspected, is_certain = any(work is self._work for work in ended), len(ended) == 1
        self._work = None
        amount = suspicion if is_suspected else 0
        recomputed = self._rereading.undo(amount, is_certain=is_certain) if self._rereading.is_under_way else None
        self.restoring.undo(has_broken=amount >= BREAK)
        if self._moving.is_under_way:
            self._moving.undo(has_broken=amount >= BREAK and is_certain)
        return recomputed if is_suspected else None

    def fail(self) -> SegmentPlacement | None:
        """What was under way is no use. Gives the segment of which it read, if anybody still needs it."""
        self._work = None
        return self._rereading.undo(0, is_certain=True)

    def change_ranks(self, ranking: RankMapping) -> None:
        """Has the books be those of the next epoch. Nothing else may be promised."""
        assert self._work is None
        bare = self._moving.bare | set[int]()
        self._rereading.forget_promises()
        first = ranking.before[0]
        has_windows = first is not None and first not in bare and not self._moving.is_stuck
        regroup(self._placer, self._segments, ranking, has_windows=has_windows)
        self._moving.change_ranks(ranking.after, ranking.newcomers, has_windows=has_windows)
        self._losses = {holding.segment.id: holding.loss for holding in self._holdings.lossy if holding.loss}
        self.is_over = False

    def call(self, evicted: Sequence[SegmentPlacement]) -> None:
        """Has what is parked be read again; each comes after what it continues."""
        call(self._placer, self._segments, evicted)
        self._losses |= {holding.segment.id: holding.loss for holding in evicted if holding.loss}
        self.is_over = self.is_over and not evicted

    def promise(self, paths: Sequence[TokenPath]) -> None:
        """Promises blocks for what is lost, first for what these paths need, as far as there is room; and orders what
        can be fetched for it."""
        if not self.is_promised:
            self._rereading.promise(paths)
        self.restoring.go_on(paths)

    # --- plans ---

    def plan(self, paths: Iterable[TokenPath], size: int) -> Prefill | Move | Restore | None:
        """What comes next, with chunks of up to `size` tokens; None when nothing can be done now. Raises
        RecoveryFailed."""
        assert self._work is None
        if self.is_bare:
            self._work = self._moving.hand_out()
        if self._work is None:
            self._work = self.restoring.plan() or self._rereading.plan(paths, size) or self._moving.plan()
        return self._work

    def owns(self, work: Work) -> bool:
        """Whether a step was planned here."""
        return self._work is work

    def commit(self) -> SegmentPlacement | None:
        """What was under way is done. Gives the segment of which tokens are held again, if anybody still needs it.
        Raises RecoveryFailed."""
        self._work, segment = None, self.restoring.under_way or self._rereading.under_way
        if segment is None:
            self._moving.commit()
            return None
        try:
            return self.restoring.commit() if self.restoring.is_under_way else self._rereading.commit()
        except Exception as error:
            if self._rereading.is_under_way:
                self._rereading.undo(0, is_certain=True)
            raise RecoveryFailed(segment) from error

    def settle(self) -> None:
        """Looks whether it is over, and then gives back what only it needs."""
        if self._work is None and self._holdings.is_whole:
            self._losses.clear()
            self._rereading.return_rolling()
            self.is_over = self._moving.is_over

    # --- progress ---

    def progress(self, path: TokenPath) -> Recovering | None:
        """How much of a path is lost, and how far all is held again; None when all of the path is held."""
        num_lost = self._holdings.num_lost(path)
        return self._told(num_lost) if num_lost else None

    @property
    def total(self) -> Recovering | None:
        """How far all is held again; None when it is."""
        return None if self._holdings.is_whole else self._told(self.num_lost)

    def _told(self, num_lost: int) -> Recovering:
        total = sum(end - start for loss in self._losses.values() for start, end in loss.ranges)
        return Recovering(num_lost, total - self.num_lost, total)
