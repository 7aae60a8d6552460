"""Recomputation of lost runs, in order of position along paths and distributed over all ranks. Pure."""

from array import array
from collections.abc import Callable, Iterable

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer, Reservation
from coordinator.kv_cache.lost_ranges import LostRanges
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment, TokenPath
from coordinator.recovery.fault_score import raise_score
from longleaf.rank_protocol.step import Prefill


class RecoveryFailed(Exception):
    """A segment cannot be recomputed or restored, so everything that uses it must be dropped. Its cause is
    unexpected."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(f"segment {segment.id}")
        self.segment = segment


class RecomputePlanner:
    """Plans recomputation, one plan at a time. Blocks for a lost segment are reserved before any part of it is planned,
    so that recomputation cannot run out of blocks."""

    def __init__(
        self, placer: BlockPlacer, segments: SegmentStore, comes_back: Callable[[SegmentPlacement], bool]
    ) -> None:
        """`comes_back` returns whether a segment is being restored from storage; such a segment is not recomputed
        meanwhile."""
        self._placer = placer
        self._is_being_restored = comes_back
        self._segments = segments
        self._placements = segments.placements
        self._scratch: Reservation | None = None
        """With replicated windows, window blocks for the chunk that is recomputed."""
        self._current: SegmentPlacement | None = None
        """With replicated windows, the segment that uses these blocks."""
        self._lent_to: LostRanges | None = None
        """The lost ranges of that segment at that time: it may have been evicted and reloaded since."""
        self._under_way: SegmentPlacement | None = None

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    @property
    def under_way(self) -> Segment | None:
        """The segment that the plan under way recomputes."""
        return self._under_way.segment if self._under_way else None

    # --- reservations ---

    def clear_reservations(self) -> None:
        """Releases all reservations, because the new ranks may have fewer blocks."""
        for placement in self._placements.with_losses:
            loss = placement.loss
            if loss is not None and loss.reservation is not None:
                self._placer.release(loss.reservation)
                loss.reservation = None
        self._current = None
        self.release_scratch()

    def release_scratch(self) -> None:
        """Releases the window blocks for recomputation, unless a segment uses them."""
        if self._scratch is not None:
            self._placer.release(self._scratch)
            self._scratch = None

    @property
    def num_scratch(self) -> BlockCount:
        """Blocks that are needed only during recomputation."""
        pool = self._placer.window_pool
        sizes = [
            placement.loss.num_tokens
            for placement in self._placements.with_losses
            if placement.loss and placement.loss.left
        ]
        return BlockCount(windows=max(map(pool.chunk_blocks, sizes), default=0))

    @property
    def num_reserved(self) -> BlockCount:
        """Reserved blocks that belong to no segment."""
        return self._scratch.left if self._scratch else BlockCount()

    @property
    def is_reserved(self) -> bool:
        """Blocks are reserved for all lost ranges."""
        if self._placer.windows is not None and not self._placements.is_whole and not self._has_scratch:
            return False
        return all(placement.loss.reservation for placement in self._placements.with_losses if placement.loss)

    @property
    def _has_scratch(self) -> bool:
        has_enough = self._scratch is not None and self.num_scratch.fits(self._scratch.left)
        return has_enough or self._is_lent

    @property
    def _is_lent(self) -> bool:
        """The segment that uses the window blocks is still being recomputed."""
        return self._current is not None and self._current.loss is not None and self._current.loss is self._lent_to

    def reserve_lost(self, paths: Iterable[TokenPath]) -> None:
        """Reserves blocks for lost segments as far as possible, first for those on `paths`. Contexts are evicted only
        for these."""
        needed = dict.fromkeys(self._placements.for_segments(segment for path in paths for segment in path.segments))
        if self._placer.windows is not None and not self._has_scratch:
            self.release_scratch()
            self._scratch = self._reserve(self.num_scratch, may_evict=bool(needed))
        for placement in dict.fromkeys([*needed, *self._placements.with_losses]):
            if placement.loss is not None and placement.loss.reservation is None:
                blocks = placement.loss.num_blocks(self._placer.block_size)
                placement.loss.reservation = self._reserve(blocks, may_evict=placement in needed)

    def num_unreserved(self, path: TokenPath) -> BlockCount:
        """Blocks that must be reserved before the lost keys of a path can be recomputed."""
        placements = self._placements.for_segments(path.segments)
        losses = [placement.loss for placement in placements if placement.loss is not None]
        size = self._placer.block_size
        blocks = sum((loss.num_blocks(size) for loss in losses if loss.reservation is None), BlockCount())
        has_scratch = not losses or self._placer.windows is None or self._has_scratch
        return blocks if has_scratch else blocks + self.num_scratch - self.num_reserved

    def _reserve(self, blocks: BlockCount, *, may_evict: bool) -> Reservation | None:
        return self._placer.reserve(blocks) if self._segments.make_room(blocks, may_evict=may_evict) else None

    # --- plans ---

    def plan(self, paths: Iterable[TokenPath], size: int) -> Prefill | None:
        """Plans the recomputation of up to `size` tokens, first those that `paths` need; None when there is nothing to
        do. Raises RecoveryFailed."""
        found = self._choose(paths)
        if found is None:
            return None
        try:
            return self._plan(*found, size)
        except Exception as error:
            if (loss := found[0].loss) is not None:
                loss.has_failed = True
            raise RecoveryFailed(found[0].segment) from error

    def _plan(self, placement: SegmentPlacement, end: int, size: int) -> Prefill:
        loss, segment = placement.loss, placement.segment
        assert loss is not None
        assert loss.reservation is not None
        ranges = [(low, high) for low, high in loss.left if low < end]
        pieces = self._placer.place_recomputed(ranges, size, loss.reservation)
        assert pieces
        start, stop = pieces[0].start, pieces[-1].end
        place = min(placement.seams, default=start)
        placement.incoming = pieces  # set first, so that they are freed with the segment if planning fails
        placement.window_runs = self._placer.recompute_windows(
            placement.window_runs, (start, stop), loss.windows_from, place, loss.reservation
        )
        placement.is_reported = True
        self._under_way = placement
        token_ids = array("I")
        for piece in pieces:
            token_ids += segment.token_ids[piece.start - segment.start : piece.end - segment.start]
        return Prefill(segment.path.ids, start, tuple(token_ids), pieces, segment.rope, placement.window_runs)

    def _choose(self, paths: Iterable[TokenPath]) -> tuple[SegmentPlacement, int] | None:
        """The segment to recompute next, and the position up to which it is needed."""
        if self._placer.windows is not None:
            return self._choose_rolled(paths)
        for path in paths:
            found = self._placements.first_lost(path)
            if found and self._may_begin(found[0]):
                return found
        for placement in self._placements.with_losses:
            if self._may_begin(placement) and self._placements.holds(placement.segment.before):
                return placement, placement.segment.end
        return None

    def _may_begin(self, placement: SegmentPlacement) -> bool:
        loss = placement.loss
        return (
            loss is not None
            and loss.reservation is not None
            and not loss.has_failed
            and not self._is_being_restored(placement)
        )

    def _choose_rolled(self, paths: Iterable[TokenPath]) -> tuple[SegmentPlacement, int] | None:
        """With replicated windows, one segment is recomputed to its end before the next one begins."""
        current = self._current
        if current is not None and self._is_lent:
            return (current, current.segment.end) if self._may_begin(current) else None
        self._current = None
        if self._scratch is None or not self._has_scratch:
            return None
        lossy = [found[0] for path in paths if (found := self._placements.first_lost(path))]
        for placement in [*lossy, *self._placements.with_losses]:
            loss = placement.loss
            if (
                loss
                and loss.reservation
                and self._may_begin(placement)
                and self._placements.holds(placement.segment.before)
            ):
                loss.reservation.left += self._scratch.left
                self._scratch, self._current, self._lent_to = None, placement, loss
                return placement, placement.segment.end
        return None

    def commit(self) -> SegmentPlacement | None:
        """The plan under way is complete. Returns the recomputed segment, or None if nothing needs it any more."""
        placement, self._under_way = self._under_way, None
        if placement is None or placement.loss is None:
            return None
        loss, pieces = placement.loss, placement.incoming
        placement.incoming = ()
        placement.put(pieces)
        for piece in pieces:
            loss.fill(piece.start, piece.end)
        if not loss.left:
            self._segments.drop_frontier(placement)
            self._reclaim_scratch(loss)
            self._segments.end_loss(placement)
        elif self._placer.windows is not None:
            self._segments.add_frontier(placement, loss.first)
        return placement

    def _reclaim_scratch(self, loss: LostRanges) -> None:
        """Keeps the window blocks for the next segment."""
        assert loss.reservation is not None
        if self._is_lent:
            most = min(self.num_scratch.windows, loss.reservation.left.windows)  # reloads may have raised num_scratch
            self._scratch = loss.reservation.split(BlockCount(windows=most))
            self._current = None

    def undo(self, suspicion: int, *, is_certain: bool) -> SegmentPlacement | None:
        """Reverts the plan under way and adds `suspicion` to the segment's fault score. Returns the segment, or None if
        nothing needs it any more."""
        placement, self._under_way = self._under_way, None
        if placement is None or placement.loss is None:
            return None
        loss = placement.loss
        assert loss.reservation is not None
        if suspicion:
            loss.suspicion = raise_score(loss.suspicion, suspicion, is_certain=is_certain)
            loss.suspect_end = max(loss.suspect_end, placement.incoming[-1].end)
        self._placer.return_unwritten(placement.incoming, loss.reservation)
        placement.incoming = ()
        placement.window_runs = self._placer.roll_back(placement.window_runs, loss.first, loss.reservation)
        return placement
