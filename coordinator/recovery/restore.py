"""Restore of lost keys from storage: which rank fetches which piece, and the blocks that the pieces go to. Pure.

Objects are fetched in parallel with the steps; a later step copies them into blocks. Pieces that cannot be fetched stay
lost and are recomputed. Where windows are replicated, a segment is restored completely in one step or not at all,
because recomputation cannot begin in the middle of a segment.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.lost_ranges import LostRanges
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.step import Restore, RestorePortion
from longleaf.runs import Range, Run, ceil_div
from longleaf.storage.manifest import PieceRef

MAX_FETCHED = 4
"""Maximum number of pieces per rank that are being fetched, or fetched and not yet copied into blocks."""


def none_stored(segment: int) -> bool:
    """The default for `is_stored`: no segment is in storage."""
    del segment
    return False


# --- actions, which the caller executes ---


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """Read the manifest of a segment. The answer is ManifestFound, SnapshotDamaged or SegmentUnavailable."""

    segment: Segment


@dataclass(frozen=True, slots=True)
class FetchPiece:
    """A rank must fetch a piece. The answer is PieceFetched, SnapshotDamaged or SegmentUnavailable; there is none if
    the epoch ends first."""

    ticket: int
    rank: int
    """EVERY_RANK for all ranks."""
    segment_id: int
    piece: PieceRef
    of_windows: bool


@dataclass(frozen=True, slots=True)
class DiscardPiece:
    """The ranks that were ordered to fetch a piece must free it. Its fetch may not have ended."""

    ticket: int


@dataclass(frozen=True, slots=True)
class CheckSnapshot:
    """The restore of a segment broke an epoch. The answer is SnapshotDamaged if its snapshot is to blame."""

    segment_id: int


@dataclass(frozen=True, slots=True)
class RemoveDamaged:
    """Remove damaged snapshots from the catalog; nothing uses them any more. The answer is DamagedRemoved."""

    reasons: Mapping[int, str]
    """By segment id."""


RestoreAction = ReadManifest | FetchPiece | DiscardPiece | CheckSnapshot | RemoveDamaged


# --- events, which the caller reports ---


@dataclass(frozen=True, slots=True)
class ManifestFound:
    """Storage has these pieces of a segment, and its window piece."""

    segment_id: int
    pieces: Sequence[PieceRef]
    windows: PieceRef | None = None


@dataclass(frozen=True, slots=True)
class PieceFetched:
    """A piece is in the memory of the ranks that were ordered to fetch it."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SegmentUnavailable:
    """Storage cannot be read now: the rest of a segment is recomputed."""

    segment_id: int


@dataclass(frozen=True, slots=True)
class SnapshotDamaged:
    """The manifest or a piece of a segment is missing or damaged on storage."""

    segment_id: int
    reason: str
    imported_with: Sequence[int] = ()
    """The segments of its archive, none of which is used from now on; empty if it was not imported."""
    ticket: int | None = None
    """The fetch of the damaged piece; None if the manifest is damaged."""


@dataclass(frozen=True, slots=True)
class DamagedRemoved:
    """The catalog has no snapshots of these segments any more. Later ones are used again."""

    segment_ids: Iterable[int]


RestoreEvent = ManifestFound | PieceFetched | SegmentUnavailable | SnapshotDamaged | DamagedRemoved


# --- the state machine ---


@dataclass(slots=True, eq=False)
class _Chunk:
    """The blocks of a piece that one rank restores, or the window piece, which all ranks restore."""

    fetch: FetchPiece
    runs: tuple[Run, ...]
    is_there: bool = False
    """It has been fetched."""


@dataclass(slots=True, eq=False)
class _SegmentRestore:
    """A segment that is being restored."""

    placement: SegmentPlacement
    loss: LostRanges
    left: list[tuple[PieceRef, list[Range]]] | None = None
    """Pieces and their ranges that are not ordered yet; None until storage has listed the pieces."""
    windows: PieceRef | None = None
    """The window piece."""
    chunks: dict[int, _Chunk] = field(default_factory=dict[int, _Chunk])
    """Chunks that are ordered but not yet in blocks, by ticket."""

    @property
    def is_stale(self) -> bool:
        """Nothing needs the segment any more, or it was evicted and reloaded since."""
        return self.placement.loss is not self.loss


class RestorePlanner:
    """The state machine of all restores, of segments with reserved blocks.

    A restore reads the manifest of a segment, orders pieces from ranks, writes fetched pieces into blocks, one plan at
    a time, and ends when nothing is left that storage has. Storage and ranks report with `handle`, and receive orders
    from `pop_actions`. Each fetched piece is discarded once, after it was written or if nothing needs it any more.
    """

    def __init__(
        self, placer: BlockPlacer, segments: SegmentStore, is_stored: Callable[[int], bool] = none_stored
    ) -> None:
        """`is_stored` returns whether storage has a segment in a format that these ranks can load."""
        self._placer = placer
        self._placements = segments.placements
        self._segments = segments
        self._is_stored = is_stored
        self._returns: dict[int, _SegmentRestore] = {}
        self._next_ticket = 0
        self._under_way: tuple[_SegmentRestore, list[_Chunk]] | None = None
        self._actions: list[RestoreAction] = []
        self._faults: list[Exception] = []
        self._damaged: dict[int, str] = {}
        """The reasons for damaged segments, by segment id, until they are removed from the catalog. They are not
        restored meanwhile."""
        self._being_removed: set[int] = set()

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    @property
    def under_way(self) -> Segment | None:
        """The segment that the plan under way restores."""
        return self._under_way[0].placement.segment if self._under_way else None

    def pop_faults(self) -> list[Exception]:
        """Removes and returns unexpected errors, for the log. The affected segments are recomputed."""
        faults, self._faults = self._faults, []
        return faults

    def has(self, placement: SegmentPlacement) -> bool:
        """Whether a segment is being restored. It must not be recomputed until that has ended."""
        found = self._returns.get(placement.segment.id)
        return found is not None and not found.is_stale

    def needs(self, segment: int) -> bool:
        """Whether a fetch for a segment may still be needed."""
        return segment in self._returns

    # --- events and actions ---

    def pop_actions(self) -> list[RestoreAction]:
        """Removes and returns the actions that the caller must start now, in this order."""
        removable = self._damaged.keys() - self._returns.keys() - self._being_removed
        if removable:  # all fetches of these segments have ended, or their results are discarded
            self._being_removed |= removable
            self._actions.append(RemoveDamaged({one: why for one, why in self._damaged.items() if one in removable}))
        actions, self._actions = self._actions, []
        return actions

    def handle(self, event: RestoreEvent) -> None:
        """Takes an answer to an action. Answers that nothing needs any more are ignored."""
        match event:
            case ManifestFound():
                self._list(event)
            case PieceFetched(ticket):
                if (one := self._by_ticket(ticket)) is not None:
                    one.chunks[ticket].is_there = True
            case SegmentUnavailable(segment_id):
                self._abandon(segment_id)
            case SnapshotDamaged():
                self._mark_damaged(event)
            case DamagedRemoved(segment_ids):
                for segment_id in segment_ids:
                    self._being_removed.discard(segment_id)
                    del self._damaged[segment_id]

    def _by_ticket(self, ticket: int | None) -> _SegmentRestore | None:
        return next((one for one in self._returns.values() if ticket in one.chunks), None)

    def _list(self, found: ManifestFound) -> None:
        """Takes the pieces of a segment. Pieces that begin or end within a block are not used: recomputing the adjacent
        tokens would take more blocks than are reserved."""
        if (one := self._returns.get(found.segment_id)) is None or one.left is not None:
            return
        one.windows, one.left = found.windows, []
        for piece in found.pieces:
            common = _common(piece.runs, one.loss.left)
            if common and all(self._is_whole(one, low, high) for low, high in (*piece.runs, *common)):
                one.left.append((piece, common))
        if self._placer.windows is not None and not self._is_covered(one):
            one.left = []
        self._end_if_over(one)

    def _is_whole(self, one: _SegmentRestore, low: int, high: int) -> bool:
        """Whether positions [low, high) are whole blocks of a segment; the last block of the segment may be partial."""
        segment, size = one.placement.segment, self._placer.block_size
        return (low - segment.start) % size == 0 and (high == segment.end or (high - segment.start) % size == 0)

    def _abandon(self, segment_id: int) -> None:
        """Restores nothing more of a segment. Chunks in the plan under way are written."""
        if (one := self._returns.get(segment_id)) is None:
            return
        planned = self._under_way[1] if self._is_planned(one) and self._under_way else []
        one.left = []
        for chunk in [chunk for chunk in one.chunks.values() if chunk not in planned]:
            self._drop(one, chunk)
        self._end_if_over(one)

    def _mark_damaged(self, event: SnapshotDamaged) -> None:
        """Of a segment of this service, only the damaged piece is recomputed; with replicated windows, all of it."""
        self._damaged.setdefault(event.segment_id, event.reason)
        for other in event.imported_with:
            if other != event.segment_id:
                reason = f"it was imported with segment {event.segment_id}, which is damaged"
                self._damaged.setdefault(other, reason)
            self._abandon(other)
        one = self._by_ticket(event.ticket)
        if event.ticket is None or (one is not None and self._placer.windows is not None):
            self._abandon(event.segment_id)
        elif one is not None:
            assert one.left is not None
            chunk = one.chunks[event.ticket]
            one.left = [(piece, ranges) for piece, ranges in one.left if piece is not chunk.fetch.piece]
            self._drop(one, chunk)
            self._end_if_over(one)

    # --- fetch orders ---

    def resume(self, paths: Iterable[TokenPath]) -> None:
        """Orders the fetches that are possible now, first those that `paths` need."""
        for one in [one for one in self._returns.values() if one.is_stale and not self._is_planned(one)]:
            self._forget(one)
        needed = self._placements.for_segments(segment for path in paths for segment in path.segments)
        for placement in dict.fromkeys([*needed, *self._placements.with_losses]):
            if (one := self._returns.get(placement.segment.id)) is None:
                one = self._begin(placement)
            if one is not None and one.left and not one.is_stale:  # else the plan under way still uses it
                try:
                    self._order(one)
                except Exception as error:
                    self._give_up(one, error)

    def _begin(self, placement: SegmentPlacement) -> _SegmentRestore | None:
        segment, loss = placement.segment, placement.loss
        if loss is None or loss.reservation is None or not loss.may_return:
            return None
        if segment.id in self._damaged or not self._is_stored(segment.id):
            return None
        if placement.incoming:  # it is being recomputed
            return None
        if self._placer.windows is not None and (loss.left != [(segment.start, segment.end)] or placement.window_runs):
            return None
        one = self._returns[segment.id] = _SegmentRestore(placement, loss)
        self._actions.append(ReadManifest(segment))
        return one

    def _order(self, one: _SegmentRestore) -> None:
        """Distributes the remaining pieces over the ranks, those with the most free blocks first. No rank gets more
        than its share at once."""
        placer, reservation = self._placer, one.loss.reservation
        assert reservation is not None
        is_whole = placer.windows is not None
        share = ceil_div(one.loss.num_blocks(placer.block_size).sharded, len(placer.pools))
        while one.left and (rank := self._next_rank(is_whole=is_whole)) is not None:
            piece, ranges = one.left.pop(0)
            runs, rest = placer.place_restored(rank, ranges, share, reservation)
            if rest:
                one.left.insert(0, (piece, rest))
            one.placement.incoming += runs
            self._add(one, rank, piece, runs)
        if is_whole and not one.left and one.windows is not None and self._window_ranges(one):
            self._add(one, EVERY_RANK, one.windows, ())

    def _next_rank(self, *, is_whole: bool) -> int | None:
        """The rank with the most free blocks among those that may fetch more."""
        counts = [0] * len(self._placer.pools)
        for rank in (chunk.fetch.rank for one in self._returns.values() for chunk in one.chunks.values()):
            if rank != EVERY_RANK:
                counts[rank] += 1
        pools = self._placer.pools
        found = [rank for rank, n in enumerate(counts) if pools[rank].num_free and (is_whole or n < MAX_FETCHED)]
        return max(found, key=lambda rank: pools[rank].num_free, default=None)

    def _add(self, one: _SegmentRestore, rank: int, piece: PieceRef, runs: tuple[Run, ...]) -> None:
        segment_id, of_windows = one.placement.segment.id, rank == EVERY_RANK
        fetch = FetchPiece(self._next_ticket, rank, segment_id, piece, of_windows)
        self._next_ticket += 1
        one.chunks[fetch.ticket] = _Chunk(fetch, runs)
        self._actions.append(fetch)

    # --- plans ---

    def plan(self) -> Restore | None:
        """Copies fetched chunks of one segment into blocks: at most one per rank, or with windows all of them; None
        when nothing can be done now."""
        for one in list(self._returns.values()):
            if not one.is_stale and (chunks := self._ready(one)):
                try:
                    return self._plan(one, chunks)
                except Exception as error:
                    self._give_up(one, error)
        return None

    def _give_up(self, one: _SegmentRestore, error: Exception) -> None:
        """Abandons the restore of a segment after an unexpected error."""
        self._faults.append(error)
        self._abandon(one.placement.segment.id)

    def _ready(self, one: _SegmentRestore) -> list[_Chunk]:
        there = [chunk for chunk in one.chunks.values() if chunk.is_there]
        if self._placer.windows is not None:
            return there if not one.left and len(there) == len(one.chunks) else []
        return list({chunk.fetch.rank: chunk for chunk in reversed(there)}.values())

    def _plan(self, one: _SegmentRestore, chunks: list[_Chunk]) -> Restore:
        placement = one.placement
        portions = tuple(RestorePortion(chunk.fetch.ticket, chunk.runs) for chunk in chunks if chunk.runs)
        windows = next((chunk.fetch for chunk in chunks if chunk.fetch.of_windows), None)
        if windows is not None:
            assert one.loss.reservation is not None
            placement.window_runs = self._placer.place_windows(self._window_ranges(one), one.loss.reservation)
        placement.is_reported, self._under_way = True, (one, chunks)
        if windows is None:
            return Restore(placement.segment.id, placement.segment.start, portions)
        return Restore(placement.segment.id, placement.segment.start, portions, placement.window_runs, windows.ticket)

    def _window_ranges(self, one: _SegmentRestore) -> list[Range]:
        """The window ranges to restore: whole blocks of the window piece, starting with the block that contains the
        first visible position."""
        size, found = self._placer.window_block_size, list[Range]()
        for low, high in one.windows.runs if one.windows else ():
            first = low + max(0, one.loss.windows_from - low) // size * size
            if first < high:
                found.append((first, high))
        return found

    def _is_covered(self, one: _SegmentRestore) -> bool:
        """Whether the pieces cover all lost ranges of a segment, the window piece covers all visible windows, and the
        reservation has enough blocks."""
        loss, reservation, end = one.loss, one.loss.reservation, one.placement.segment.end
        assert one.left is not None
        assert reservation is not None
        ranges = self._window_ranges(one)
        seen = _common(ranges, [(min(end, loss.windows_from), end)])
        num_blocks = sum(ceil_div(high - low, self._placer.window_block_size) for low, high in ranges)
        is_whole = sum(high - low for _, found in one.left for low, high in found) == loss.num_tokens
        is_seen = sum(high - low for low, high in seen) == end - min(end, loss.windows_from)
        return is_whole and is_seen and num_blocks <= reservation.left.windows

    def commit(self) -> SegmentPlacement | None:
        """The plan under way is complete. Returns the restored segment, or None if nothing needs it any more."""
        assert self._under_way is not None
        (one, chunks), self._under_way = self._under_way, None
        if one.is_stale:
            self._forget(one)
            return None
        placement, loss = one.placement, one.loss
        for chunk in chunks:
            placement.incoming = _without(placement.incoming, chunk.runs)
            placement.put(chunk.runs)
            for run in chunk.runs:
                loss.fill(run.start, run.end)
            del one.chunks[chunk.fetch.ticket]
            self._discard(chunk)
        if not loss.left:
            self._segments.drop_frontier(placement)
            self._segments.end_loss(placement)
            del self._returns[placement.segment.id]
        else:
            self._end_if_over(one)
        return placement

    def undo(self, *, has_broken: bool) -> None:
        """Cancels all restores at the end of an epoch. A segment whose restore broke the epoch is recomputed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            one, _ = under_way
            one.loss.may_return &= not has_broken
            if has_broken:
                self._actions.append(CheckSnapshot(one.placement.segment.id))
            if not one.is_stale:
                assert one.loss.reservation is not None
                one.placement.window_runs = self._placer.roll_back(
                    one.placement.window_runs, one.loss.first, one.loss.reservation
                )
        for one in list(self._returns.values()):
            self._forget(one)

    # --- end of a restore ---

    def _is_planned(self, one: _SegmentRestore) -> bool:
        """The plan under way uses fetched chunks of this segment."""
        return self._under_way is not None and self._under_way[0] is one

    def _end_if_over(self, one: _SegmentRestore) -> None:
        """Ends a restore that has no more chunks; the tokens that are still lost are recomputed."""
        if one.left == [] and not one.chunks and not one.is_stale:
            one.loss.may_return = False
            self._forget(one)

    def _forget(self, one: _SegmentRestore) -> None:
        for chunk in list(one.chunks.values()):
            self._drop(one, chunk)
        self._revoke(ReadManifest(one.placement.segment))
        del self._returns[one.placement.segment.id]

    def _drop(self, one: _SegmentRestore, chunk: _Chunk) -> None:
        del one.chunks[chunk.fetch.ticket]
        self._discard(chunk)
        if not one.is_stale:  # otherwise the blocks are free already
            assert one.loss.reservation is not None
            one.placement.incoming = _without(one.placement.incoming, chunk.runs)
            self._placer.return_unwritten(chunk.runs, one.loss.reservation)

    def _discard(self, chunk: _Chunk) -> None:
        if not self._revoke(chunk.fetch):
            self._actions.append(DiscardPiece(chunk.fetch.ticket))

    def _revoke(self, action: RestoreAction) -> bool:
        """Removes an action that has not been popped. Returns whether there was one."""
        if action not in self._actions:
            return False
        self._actions.remove(action)
        return True


def _without(runs: Sequence[Run], taken: Sequence[Run]) -> tuple[Run, ...]:
    ids = set(map(id, taken))
    return tuple(run for run in runs if id(run) not in ids)


def _common(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """The intersection of two ascending lists of ranges."""
    return list(_meet(iter(ranges), iter(others)))


def _meet(ranges: Iterator[Range], others: Iterator[Range]) -> Iterator[Range]:
    one, other = next(ranges, None), next(others, None)
    while one is not None and other is not None:
        low, high = max(one[0], other[0]), min(one[1], other[1])
        if low < high:
            yield low, high
        if one[1] < other[1]:
            one = next(ranges, None)
        else:
            other = next(others, None)
