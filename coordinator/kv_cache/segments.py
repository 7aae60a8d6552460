"""The segment store: referenced segments, and cached segments of earlier prompts."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer, count_blocks
from coordinator.kv_cache.lost_ranges import LostRanges
from coordinator.kv_cache.prefix_cache import ContinuationIndex, PrefixIndex
from coordinator.kv_cache.segment_placement import SegmentPlacement, SegmentPlacements
from coordinator.kv_cache.token_paths import EMPTY_PATH, Segment, TokenPath
from longleaf.positions import OWN_ROPE, Rope
from longleaf.rank_protocol.group_messages import SegmentLayout
from longleaf.runs import Run
from longleaf.tenants import DEFAULT_TENANT

MIN_CACHED = 2
"""Minimum number of tokens of a cached segment. One token is not worth a block."""


def no_eviction(lacking: BlockCount) -> bool:
    """The default of SegmentStore: no context can be evicted."""
    del lacking
    return False


class SegmentStore:
    """All referenced segments. Dropping the last reference frees the blocks.

    A reference to a segment includes the whole path before it. Segments of processed prompts stay cached for prompts
    with the same prefix. Blocks that only the cache uses count as free; `make_room` frees them, least recently used
    first.
    """

    def __init__(
        self,
        placer: BlockPlacer,
        *,
        share_prefixes: bool = False,
        evict: Callable[[BlockCount], bool] = no_eviction,
    ) -> None:
        """`evict` evicts contexts until so many more blocks are free or reclaimable; it returns False if that is not
        possible."""
        self._placer = placer
        self._evict = evict
        self.placements = SegmentPlacements(placer.windows)
        self._prefixes = PrefixIndex(placer.block_size, self.placements, is_shared=share_prefixes)
        self._continuations = ContinuationIndex(self.placements)
        self._cached: OrderedDict[int, SegmentPlacement] = OrderedDict()
        self._next_id = 0
        self._num_evicted = 0
        """Number of evictions so far."""
        self._forgotten: list[int] = []
        self._cuts: dict[int, int] = {}
        self.num_reclaimable = BlockCount()
        """Blocks that `make_room` can free without evicting contexts."""

    def create(self, before: TokenPath, rope: Rope, tenant: str) -> SegmentPlacement:
        """Creates a growing segment of a tenant, with one reference, which belongs to the caller. The path before it
        must have the same rope."""
        placement = SegmentPlacement(Segment(self._next_id, before, rope, tenant))
        self.placements.add(placement)
        self._next_id += 1
        return placement

    def close(self, segment: Segment) -> None:
        """Ends a segment's growth. Frees the windows that are seen neither by the next token nor from a seam of the
        segment."""
        placement, segment.is_sealed = self.placements[segment], True
        place = min(segment.end, placement.first_seam)
        placement.window_runs = self._placer.window_pool.trim(placement.window_runs, place)

    def seal(self, segment: Segment) -> None:
        """Closes a segment and adds it to the prefix cache."""
        self.close(segment)
        self._prefixes.add(segment)

    def truncate(self, placement: SegmentPlacement, end: int) -> list[Run]:
        """Removes the last tokens of a segment, which may not have been computed yet. The next plan makes the ranks
        forget them. Returns runs with the freed blocks."""
        if placement.segment.end == end:
            return []
        placement.segment.cut(end)
        self._cuts[placement.segment.id] = end
        return placement.truncate(end, self._placer.block_size)

    def retain(self, path: TokenPath, origin: TokenPath = EMPTY_PATH) -> None:
        """Adds references to the segments of a path after its prefix `origin`, which the caller references already, and
        holds the windows that the path's next token sees."""
        for placement in self.placements.for_segments(path.segments[len(origin.segments) :]):
            self._add_references(placement, 1, 0)
        self.pin_windows(path, path.end)

    def release(self, path: TokenPath, origin: TokenPath = EMPTY_PATH) -> None:
        """Reverts `retain`. Unreferenced segments are freed, and the next plan makes the ranks forget them."""
        self.unpin_windows(path, path.end)
        # in reverse order: the lost ranges of a segment hold a position on the segments before it
        for placement in self.placements.for_segments(reversed(path.segments[len(origin.segments) :])):
            self._add_references(placement, -1, 0)

    def drop(self, segment: Segment) -> None:
        """Drops the reference with which the segment was created."""
        self._add_references(self.placements[segment], -1, 0)

    def pin_windows(self, path: TokenPath, end: int) -> None:
        """Holds the windows that a token at `end` sees. The caller must reference the path."""
        for placement in self.placements.for_segments(path.seen(end, self._placer.windows)):
            placement.seams[end] += 1

    def unpin_windows(self, path: TokenPath, end: int) -> None:
        """Reverts `pin_windows`. Frees windows that are seen from no other position."""
        for placement in self.placements.for_segments(path.seen(end, self._placer.windows)):
            placement.seams[end] -= 1
            if not placement.seams[end]:
                del placement.seams[end]
                self.trim(placement)

    def trim(self, placement: SegmentPlacement) -> None:
        """Frees the windows of a segment before those that its first seam sees."""
        self.num_reclaimable -= placement.num_reclaimable
        pool, segment, first_seam = self._placer.window_pool, placement.segment, placement.first_seam
        trimmed = pool.trim(placement.window_runs, first_seam if segment.is_sealed else min(segment.end, first_seam))
        if (
            placement.loss is not None and placement.loss.reservation is not None
        ):  # more blocks are needed to recompute it
            freed = BlockCount(windows=count_blocks(placement.window_runs) - count_blocks(trimmed))
            self._placer.add(placement.loss.reservation, freed)
        placement.window_runs = trimmed
        self.num_reclaimable += placement.num_reclaimable

    def _add_references(self, placement: SegmentPlacement, references: int, retained: int) -> None:
        may_be_reclaimable = (
            retained or placement.num_cache_references
        )  # usually neither, and a path may have thousands of segments
        if may_be_reclaimable:
            self.num_reclaimable -= placement.num_reclaimable
        placement.num_references += references
        placement.num_cache_references += retained
        if may_be_reclaimable:
            self.num_reclaimable += placement.num_reclaimable
        if placement.num_references == 0:
            self._free(placement)
        elif references < 0:
            self._evict_idle(placement)

    def _free(self, placement: SegmentPlacement) -> None:
        self.end_loss(placement)
        self._end_eviction(placement)
        self.placements.remove(placement)
        self._prefixes.remove(placement.segment)
        self._continuations.remove(placement.segment)
        self._placer.free((*placement.runs, *placement.window_runs, *placement.incoming))
        self._forget(placement)
        placement.incoming = ()

    def _forget(self, placement: SegmentPlacement) -> None:
        """Makes the ranks forget a segment. A segment without tokens was never in a plan, so no rank knows it."""
        if placement.is_reported and placement.segment.token_ids:
            self._forgotten.append(placement.segment.id)
        self._cuts.pop(placement.segment.id, None)
        placement.is_reported = False

    # --- eviction ---

    def adopt(self, segment: Segment) -> None:
        """Adds a sealed segment with no keys held and no references yet. The caller must add references of evicted
        contexts."""
        placement = SegmentPlacement(segment)
        placement.num_references, placement.is_reported, segment.is_sealed, segment.is_adopted = 0, False, True, True
        self.placements.add(placement)
        self._begin_eviction(placement)
        self._prefixes.add(segment)
        self._next_id = max(self._next_id, segment.id + 1)

    def start_ids_at(self, next_id: int) -> None:
        """Assigns segment ids from `next_id` on: lower ids belong to an earlier service process."""
        self._next_id = max(self._next_id, next_id)

    def reserve_ids(self, count: int) -> int:
        """Reserves `count` consecutive ids for segments that will be adopted. Returns the first one."""
        first_id, self._next_id = self._next_id, self._next_id + count
        return first_id

    def release_to_idle(self, path: TokenPath) -> None:
        """Marks one reference to each segment of a path as that of an evicted context. Evicts segments that nothing
        else needs."""
        for placement in self.placements.for_segments(path.segments):
            placement.num_idle_references += 1
            self._evict_idle(placement)

    def activate(self, path: TokenPath) -> None:
        """Reverts `release_to_idle`. Evicted segments of the path stay evicted until `activate`."""
        for placement in self.placements.for_segments(path.segments):
            placement.num_idle_references -= 1

    def _evict_idle(self, placement: SegmentPlacement) -> None:
        """Evicts a segment if only evicted contexts refer to it and it can be recomputed from its start."""
        if not placement.is_idle or placement.is_evicted or not self._can_recompute(placement.segment):
            return
        self.drop_cached(lambda path: placement.segment in path.segments)
        if placement.is_evicted:  # evicted while the last cached prompt was dropped
            return
        spare = BlockCount(windows=1 if self._placer.windows else 0)  # as for lost ranges
        placement.num_evicted = placement.num_wanted(self._placer.block_size) + spare
        self.end_loss(placement)
        self._placer.free((*placement.runs, *placement.window_runs, *placement.incoming))
        self._forget(placement)
        placement.runs, placement.window_runs, placement.incoming, placement.num_sharded = [], (), (), 0
        self._begin_eviction(placement)
        if self._placer.windows is not None:  # their eviction may have depended on this one
            for other in self.placements:
                if other.segment.before.segments[-1:] == (placement.segment,):
                    self._evict_idle(other)

    def num_freed(self, idle: Mapping[Segment, int]) -> BlockCount:
        """Blocks that become free once so many more references by segment are those of evicted contexts."""
        freed = BlockCount()
        for placement in self.placements.for_segments(idle):
            if placement.is_idle_after(idle[placement.segment]):
                freed += placement.num_blocks + placement.num_reserved
        return freed

    def _can_recompute(self, segment: Segment) -> bool:
        """Whether a segment can be recomputed from its start, without any other or together with those before it."""
        if self._placer.windows is None or not self.placements.holds(segment.before):
            return True
        return self.placements.seams(segment.before, segment.start)[0] == segment.start

    def _begin_eviction(self, placement: SegmentPlacement) -> None:
        self.placements.mark_evicted(placement, is_evicted=True)
        self._num_evicted += 1
        placement.version = self._num_evicted
        self.pin_windows(placement.segment.before, placement.segment.start)

    def _end_eviction(self, placement: SegmentPlacement) -> None:
        if placement.is_evicted:
            self.placements.mark_evicted(placement, is_evicted=False)
            self.unpin_windows(placement.segment.before, placement.segment.start)

    def begin_reload(self, placement: SegmentPlacement) -> None:
        """Starts the reload of an evicted segment: all of it counts as lost from now on."""
        segment = placement.segment
        self.placements.mark_evicted(placement, is_evicted=False)
        self.begin_loss(placement, LostRanges([(segment.start, segment.end)]))
        assert placement.loss is not None
        placement.loss.front = segment.start  # held since the eviction

    # --- lost ranges ---

    def begin_loss(self, placement: SegmentPlacement, loss: LostRanges) -> None:
        """Sets the lost ranges of a segment, replacing earlier ones."""
        self.end_loss(placement)
        self.placements.note_loss(placement, loss)

    def add_frontier(self, placement: SegmentPlacement, position: int) -> None:
        """Holds the windows from which the segment is recomputed, at this position of its path."""
        loss, path = placement.loss, placement.segment.path
        assert loss is not None
        self.pin_windows(path, position)
        if loss.front is not None:
            self.unpin_windows(path, loss.front)
        loss.front = position

    def end_loss(self, placement: SegmentPlacement) -> None:
        """Clears the lost ranges of a segment and releases their reservation."""
        if (loss := placement.loss) is None:
            return
        self.placements.note_loss(placement, None)
        if loss.reservation is not None:
            self._placer.release(loss.reservation)
        self._release_frontier(placement, loss)

    def drop_frontier(self, placement: SegmentPlacement) -> None:
        """Frees the windows that were held only to recompute the segment, all of which is recovered."""
        assert placement.loss is not None
        self._release_frontier(placement, placement.loss)
        self.trim(placement)

    def _release_frontier(self, placement: SegmentPlacement, loss: LostRanges) -> None:
        if loss.front is not None:
            self.unpin_windows(placement.segment.path, loss.front)
            loss.front = None

    def drop_cached(self, is_lost: Callable[[TokenPath], bool]) -> None:
        """Drops the cached prompts whose paths `is_lost` selects."""
        for segment in [segment for segment in self.cached if is_lost(segment.path)]:
            if segment.id in self._cached:  # dropping one may evict a segment, which drops others
                self._forget_cached(segment)

    def drop_orphans(self, origin: TokenPath) -> None:
        """Drops the cached prompts that continue `origin` if nothing else refers to its last segment: its contexts are
        deleted, and no request uses them."""
        last = origin.segments[-1]
        placement = self.placements.find(last.id)
        if placement is not None and placement.num_references == placement.num_cache_references:
            for segment in [*self.cached]:
                is_orphan = segment.id in self._cached  # dropping one may evict a segment, which drops others
                if is_orphan and self._continuations.origin(segment).segments[-1:] == (last,):
                    self._forget_cached(segment)

    # --- statistics ---

    def tokens_by_rank(self) -> list[int]:
        """Number of tokens on each rank whose keys contexts and jobs need. Segments that are only cached are not
        counted."""
        resident = [0] * len(self._placer.pools)
        for run in (run for placement in self._needed() for run in placement.runs):
            resident[run.rank] += len(run)
        return resident

    @property
    def cached(self) -> Iterator[Segment]:
        """The last segments of cached prompts."""
        return (placement.segment for placement in self._cached.values())

    @property
    def num_window_tokens(self) -> int:
        """Number of these tokens in the window pool."""
        return sum(len(run) for placement in self._needed() for run in placement.window_runs)

    def _needed(self) -> Iterator[SegmentPlacement]:
        return (placement for placement in self.placements if placement.num_references > placement.num_cache_references)

    def pop_forgotten(self) -> tuple[int, ...]:
        """Removes and returns the segment ids for the next plan's release_segments."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten

    def pop_cuts(self) -> tuple[tuple[int, int], ...]:
        """Removes and returns the cuts for the next plan's cut_segments."""
        cuts, self._cuts = tuple(self._cuts.items()), {}
        return cuts

    def layout(self) -> tuple[SegmentLayout, ...]:
        """The layout of all segments that are held or lost, for ranks that have no plan yet. It replaces the pending
        release messages."""
        self.pop_forgotten()
        self.pop_cuts()
        resident = [one for one in self.placements if one.segment.token_ids and not one.is_evicted]
        for placement in resident:
            placement.is_reported = True
        return tuple(
            SegmentLayout(placement.segment.id, placement.segment.start, tuple(placement.runs), placement.window_runs)
            for placement in resident
        )

    # --- cached prompts ---

    def match(
        self,
        token_ids: "array[int]",
        rope: Rope = OWN_ROPE,
        tenant: str = DEFAULT_TENANT,
        origin: TokenPath = EMPTY_PATH,
    ) -> TokenPath:
        """The longest cached path that consists of `origin` and a prefix of `token_ids`, with `rope`, that the tenant
        may find, and that can be continued; `origin` if there is none. The path is marked as used."""
        path = self._match(token_ids, rope, tenant, origin)
        self._touch(path)
        return path

    def _match(self, token_ids: "array[int]", rope: Rope, tenant: str, origin: TokenPath) -> TokenPath:
        path = self._continuations.match(origin, token_ids, rope, tenant)
        if origin != EMPTY_PATH:
            return path
        return max(path, self._prefixes.match(token_ids, rope, tenant), key=lambda path: path.end)

    def cache(self, segment: Segment, origin: TokenPath = EMPTY_PATH) -> None:
        """Seals a segment of a prompt or an answer that continues `origin`, and caches it unless it adds nothing to
        the prefix cache."""
        token_ids = segment.path.token_ids(origin.end)
        is_known = self._match(token_ids, segment.rope, segment.tenant, origin).end == segment.end
        self.seal(segment)
        size = self._placer.block_size
        is_found = self._continuations.add(segment, origin) or segment.start // size < segment.end // size
        if is_known or not is_found or len(segment.token_ids) < MIN_CACHED:
            return
        self._cached[segment.id] = self.placements[segment]
        for part in self.placements.for_segments(segment.path.segments):
            self._add_references(part, 1, 1)
        self.pin_windows(segment.path, segment.end)
        self._touch(segment.path)

    def _touch(self, path: TokenPath) -> None:
        """Marks a path as most recently used, its first segments as more recent than its last ones."""
        for segment in reversed(path.segments):
            if segment.id in self._cached:
                self._cached.move_to_end(segment.id)

    def make_room(self, blocks: BlockCount, *, may_evict: bool = True) -> bool:
        """Frees blocks until `blocks` are free. Returns False, and frees nothing, if that is not possible. With
        `may_evict`, contexts may be evicted."""
        lacking = blocks - self._placer.num_free - self.num_reclaimable
        if not lacking.fits(BlockCount()) and not (may_evict and self._evict(lacking)):
            return False
        while not blocks.fits(self._placer.num_free):
            self._forget_cached(
                next(
                    retained.segment
                    for retained in self._cached.values()
                    if retained.num_cache_references == retained.num_references
                )
            )
        return True

    def _forget_cached(self, segment: Segment) -> None:
        del self._cached[segment.id]
        self.unpin_windows(segment.path, segment.end)
        for part in self.placements.for_segments(segment.path.segments):
            self._add_references(part, -1, -1)

    def audit(self) -> None:
        """Asserts that all segments and placements are valid, that the path before each segment exists, and that counts
        match."""
        retained = [part.id for segment in self.cached for part in segment.path.segments]
        for placement in self.placements:
            segment = placement.segment
            segment.audit()
            placement.audit()
            path = segment.path if segment.token_ids else segment.before
            path.audit() if segment.is_sealed else self.placements.audit(path)
            before = self.placements.for_segments(segment.before.segments)
            assert all(part.num_references >= placement.num_references for part in before)
            assert placement.num_cache_references == retained.count(segment.id)
        alive = [placement.segment for placement in self.placements]
        self._prefixes.audit(alive)
        self._continuations.audit(alive)
        assert set(retained) <= {segment.id for segment in alive}
        assert self.num_reclaimable == sum((placement.num_reclaimable for placement in self.placements), BlockCount())
