"""Bringing lost keys back from storage: which rank fetches what, and what is put into blocks once it is there. Pure.

Objects are fetched beside the steps; a step then puts them into blocks. What cannot be fetched stays lost, and is read
again. Where windows are replicated a segment comes back as a whole, in one step, or not at all: from the middle of one
nothing could be read again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.lost_ranges import LostRanges, Range
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.step import Restore, RestorePortion
from longleaf.runs import Run, ceil_div

MAX_FETCHED = 4
"""Pieces that a rank fetches, or has fetched, at a time."""
OF_WINDOWS = -1
"""In place of a piece's index."""


def nothing_kept(segment: int) -> bool:
    """No segment is on storage."""
    del segment
    return False


@dataclass(slots=True, eq=False)
class RestoreChunk:
    """Blocks of a piece that a rank takes in; or, of the one with windows, that all ranks do."""

    ticket: int
    rank: int
    """EVERY_RANK: all."""
    segment: int
    piece: int
    """Its index among those of the segment, or OF_WINDOWS."""
    runs: tuple[Run, ...] = ()
    is_there: bool = False
    """It has been fetched."""


@dataclass(slots=True, eq=False)
class _SegmentRestore:
    """A segment that comes back."""

    holding: SegmentPlacement
    loss: LostRanges
    left: list[tuple[int, list[Range]]] | None = None
    """Pieces, and what of them nobody fetches yet; None while it is not known which there are."""
    windows: tuple[Range, ...] = ()
    """What the piece of windows has."""
    parts: dict[int, RestoreChunk] = field(default_factory=dict[int, RestoreChunk])
    """What is fetched and not held yet, by ticket."""

    @property
    def is_stale(self) -> bool:
        """Nobody needs it any more, or it was parked and called since."""
        return self.holding.loss is not self.loss


class RestorePlanner:
    """Plans what comes back, one plan at a time, of segments that have blocks promised.

    Whoever fetches takes what is `wanted`, `ordered` and `discarded`, and tells what became of it.
    """

    def __init__(self, placer: BlockPlacer, segments: SegmentStore) -> None:
        self._placer = placer
        self._holdings = segments.holdings
        self._segments = segments
        self.is_kept: Callable[[int], bool] = nothing_kept
        """Whether a segment is on storage, in a form that these ranks can take in."""
        self._returns: dict[int, _SegmentRestore] = {}
        self._next_ticket = 0
        self._under_way: tuple[_SegmentRestore, list[RestoreChunk]] | None = None
        self._wanted: list[Segment] = []
        self._ordered: list[RestoreChunk] = []
        self._discarded: list[int] = []
        self._faults: list[Exception] = []
        self._broken: list[int] = []

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    @property
    def under_way(self) -> Segment | None:
        """The segment that the plan under way restores."""
        return self._under_way[0].holding.segment if self._under_way else None

    def take_faults(self) -> list[Exception]:
        """Unexpected errors, for the log; each is given once. The segments are read again."""
        faults, self._faults = self._faults, []
        return faults

    def has(self, holding: SegmentPlacement) -> bool:
        """Whether a segment comes back: until that has ended nothing of it may be read again."""
        found = self._returns.get(holding.segment.id)
        return found is not None and not found.is_stale

    def needs(self, segment: int) -> bool:
        """Whether anything of a segment may be fetched yet."""
        return segment in self._returns

    # --- who fetches ---

    def take_wanted(self) -> list[Segment]:
        """Segments of which must be told what storage has of them: `offer` or `refuse`. Each is given once."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def take_ordered(self) -> list[RestoreChunk]:
        """What is to be fetched: `tell` says how that went. Each is given once."""
        ordered, self._ordered = self._ordered, []
        return ordered

    def take_discarded(self) -> list[int]:
        """Tickets that nobody needs any more. Each is given once."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def take_broken(self) -> list[int]:
        """Segments in whose restores epochs broke. Each is given once."""
        broken, self._broken = self._broken, []
        return broken

    def offer(self, segment: int, pieces: Sequence[Sequence[Range]], windows: Sequence[Range]) -> None:
        """Takes the positions of each piece of a segment and of its window piece. Pieces that begin or end within a
        block are not used: recomputing the tokens beside them would take more blocks than are promised."""
        if (one := self._returns.get(segment)) is None or one.left is not None:
            return
        one.windows, one.left = tuple(windows), []
        for index, ranges in enumerate(pieces):
            common = _common(ranges, one.loss.left)
            if common and all(self._is_whole(one, low, high) for low, high in (*ranges, *common)):
                one.left.append((index, common))
        if self._placer.windows is not None and not self._is_covered(one):
            one.left = []
        self._settle(one)

    def _is_whole(self, one: _SegmentRestore, low: int, high: int) -> bool:
        """Whether positions [low, high) are whole blocks of a segment; the last block of the segment may be partial."""
        segment, size = one.holding.segment, self._placer.block_size
        return (low - segment.start) % size == 0 and (high == segment.end or (high - segment.start) % size == 0)

    def refuse(self, segment: int) -> None:
        """Storage has nothing more of a segment that could be used: the rest is read again."""
        if (one := self._returns.get(segment)) is None:
            return
        planned = self._under_way[1] if self._is_planned(one) and self._under_way else []
        one.left = []
        for part in [part for part in one.parts.values() if part not in planned]:
            self._drop(one, part)
        self._settle(one)

    def tell(self, ticket: int, *, is_there: bool) -> None:
        """A part has been fetched, or cannot be. Nothing to do where nobody needs it any more."""
        one = next((one for one in self._returns.values() if ticket in one.parts), None)
        if one is None:
            return
        part = one.parts[ticket]
        if is_there:
            part.is_there = True
        elif self._placer.windows is not None:
            self.refuse(part.segment)
        else:
            assert one.left is not None
            one.left = [(index, ranges) for index, ranges in one.left if index != part.piece]
            self._drop(one, part)
            self._settle(one)

    # --- what is to be fetched ---

    def go_on(self, paths: Iterable[TokenPath]) -> None:
        """Orders what can be fetched now, first what these paths need."""
        for one in [one for one in self._returns.values() if one.is_stale and not self._is_planned(one)]:
            self._forget(one)
        needed = self._holdings.of(segment for path in paths for segment in path.segments)
        for holding in dict.fromkeys([*needed, *self._holdings.lossy]):
            if (one := self._returns.get(holding.segment.id)) is None:
                one = self._begin(holding)
            if one is not None and one.left:
                try:
                    self._order(one)
                except Exception as error:
                    self._give_up(one, error)

    def _begin(self, holding: SegmentPlacement) -> _SegmentRestore | None:
        segment, loss = holding.segment, holding.loss
        if loss is None or loss.promise is None or not loss.may_return or not self.is_kept(segment.id):
            return None
        if holding.arriving:  # it is being read again
            return None
        if self._placer.windows is not None and (loss.left != [(segment.start, segment.end)] or holding.window_runs):
            return None
        one = self._returns[segment.id] = _SegmentRestore(holding, loss)
        self._wanted.append(segment)
        return one

    def _order(self, one: _SegmentRestore) -> None:
        """Deals what is left of the pieces over the ranks, those with most room first, and none gets more than its
        share at once."""
        placer, promise = self._placer, one.loss.promise
        assert promise is not None
        is_whole = placer.windows is not None
        share = ceil_div(one.loss.num_blocks(placer.block_size).sharded, len(placer.pools))
        while one.left and (rank := self._next_rank(is_whole=is_whole)) is not None:
            index, ranges = one.left.pop(0)
            runs, rest = placer.place_part(rank, ranges, share, promise)
            if rest:
                one.left.insert(0, (index, rest))
            one.holding.arriving += runs
            self._add(one, rank, index, runs)
        if is_whole and not one.left and self._window_ranges(one):
            self._add(one, EVERY_RANK, OF_WINDOWS, ())

    def _next_rank(self, *, is_whole: bool) -> int | None:
        """The emptiest rank that may fetch more."""
        counts = [0] * len(self._placer.pools)
        for part in (part for one in self._returns.values() for part in one.parts.values()):
            if part.rank != EVERY_RANK:
                counts[part.rank] += 1
        pools = self._placer.pools
        found = [rank for rank, n in enumerate(counts) if pools[rank].num_free and (is_whole or n < MAX_FETCHED)]
        return max(found, key=lambda rank: pools[rank].num_free, default=None)

    def _add(self, one: _SegmentRestore, rank: int, piece: int, runs: tuple[Run, ...]) -> None:
        part = RestoreChunk(self._next_ticket, rank, one.holding.segment.id, piece, runs)
        self._next_ticket += 1
        one.parts[part.ticket] = part
        self._ordered.append(part)

    # --- plans ---

    def plan(self) -> Restore | None:
        """Puts what was fetched into blocks, of one segment, at most a piece on each rank or else all of it; None when
        nothing can be done now."""
        for one in list(self._returns.values()):
            if not one.is_stale and (parts := self._ready(one)):
                try:
                    return self._plan(one, parts)
                except Exception as error:
                    self._give_up(one, error)
        return None

    def _give_up(self, one: _SegmentRestore, error: Exception) -> None:
        """What storage has of a segment cannot be used, whatever it is."""
        self._faults.append(error)
        self.refuse(one.holding.segment.id)

    def _ready(self, one: _SegmentRestore) -> list[RestoreChunk]:
        there = [part for part in one.parts.values() if part.is_there]
        if self._placer.windows is not None:
            return there if not one.left and len(there) == len(one.parts) else []
        return list({part.rank: part for part in reversed(there)}.values())

    def _plan(self, one: _SegmentRestore, parts: list[RestoreChunk]) -> Restore:
        holding = one.holding
        portions = tuple(RestorePortion(part.ticket, part.runs) for part in parts if part.runs)
        windows = next((part for part in parts if part.piece == OF_WINDOWS), None)
        if windows is not None:
            assert one.loss.promise is not None
            holding.window_runs = self._placer.place_windows(self._window_ranges(one), one.loss.promise)
        holding.is_told, self._under_way = True, (one, parts)
        if windows is None:
            return Restore(holding.segment.id, holding.segment.start, portions)
        return Restore(holding.segment.id, holding.segment.start, portions, holding.window_runs, windows.ticket)

    def _window_ranges(self, one: _SegmentRestore) -> list[Range]:
        """What is restored of windows: whole blocks of the piece, from that on in which the first begins that is
        seen."""
        size, found = self._placer.block_size, list[Range]()
        for low, high in one.windows:
            first = low + max(0, one.loss.windows_from - low) // size * size
            if first < high:
                found.append((first, high))
        return found

    def _is_covered(self, one: _SegmentRestore) -> bool:
        """Whether pieces have all that is lost of a segment, and windows all that is seen of it, for which there is
        room."""
        loss, promise, end = one.loss, one.loss.promise, one.holding.segment.end
        assert one.left is not None
        assert promise is not None
        ranges = self._window_ranges(one)
        seen = _common(ranges, [(min(end, loss.windows_from), end)])
        num_blocks = sum(ceil_div(high - low, self._placer.block_size) for low, high in ranges)
        is_whole = sum(high - low for _, found in one.left for low, high in found) == loss.num_tokens
        is_seen = sum(high - low for low, high in seen) == end - min(end, loss.windows_from)
        return is_whole and is_seen and num_blocks <= promise.left.windows

    def commit(self) -> SegmentPlacement | None:
        """What was under way is held. Gives the segment, if anybody still needs it."""
        assert self._under_way is not None
        (one, parts), self._under_way = self._under_way, None
        if one.is_stale:
            self._forget(one)
            return None
        holding, loss = one.holding, one.loss
        for part in parts:
            holding.arriving = _without(holding.arriving, part.runs)
            holding.put(part.runs)
            for run in part.runs:
                loss.fill(run.start, run.end)
            del one.parts[part.ticket]
            self._discarded.append(part.ticket)
        if not loss.left:
            self._segments.drop_front(holding)
            self._segments.end_loss(holding)
            del self._returns[holding.segment.id]
        else:
            self._settle(one)
        return holding

    def undo(self, *, has_broken: bool) -> None:
        """The epoch is over: nothing of what was fetched is held. What broke it is read again."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            one, _ = under_way
            one.loss.may_return &= not has_broken
            self._broken += [one.holding.segment.id] if has_broken else []
            if not one.is_stale:
                assert one.loss.promise is not None
                one.holding.window_runs = self._placer.roll_back(
                    one.holding.window_runs, one.loss.first, one.loss.promise
                )
        for one in list(self._returns.values()):
            self._forget(one)
        self._ordered.clear()
        self._wanted.clear()

    # --- what does not come back ---

    def _is_planned(self, one: _SegmentRestore) -> bool:
        """A plan under way needs what was fetched of it."""
        return self._under_way is not None and self._under_way[0] is one

    def _settle(self, one: _SegmentRestore) -> None:
        """Ends what has nothing more to come: what is lost still is read again."""
        if one.left == [] and not one.parts and not one.is_stale:
            one.loss.may_return = False
            self._forget(one)

    def _forget(self, one: _SegmentRestore) -> None:
        for part in list(one.parts.values()):
            self._drop(one, part)
        del self._returns[one.holding.segment.id]

    def _drop(self, one: _SegmentRestore, part: RestoreChunk) -> None:
        del one.parts[part.ticket]
        self._discarded.append(part.ticket)
        if not one.is_stale:  # else they are free by now
            assert one.loss.promise is not None
            one.holding.arriving = _without(one.holding.arriving, part.runs)
            self._placer.take_back(part.runs, one.loss.promise)


def _without(runs: Sequence[Run], taken: Sequence[Run]) -> tuple[Run, ...]:
    ids = set(map(id, taken))
    return tuple(run for run in runs if id(run) not in ids)


def _common(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """What two rising lists of ranges have in common."""
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
