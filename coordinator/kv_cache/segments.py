"""The segment store: referenced segments, and cached segments of earlier prompts."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer, count_blocks
from coordinator.kv_cache.lost_ranges import LostRanges
from coordinator.kv_cache.prefix_cache import PrefixIndex
from coordinator.kv_cache.segment_placement import SegmentPlacement, SegmentPlacements
from coordinator.kv_cache.token_paths import EMPTY_PATH, Segment, TokenPath
from longleaf.positions import OWN_ROPE, Rope
from longleaf.tenants import DEFAULT_TENANT


def no_eviction(lacking: BlockCount) -> bool:
    """The default for `evict`: no context can be evicted."""
    del lacking
    return False


class SegmentStore:
    """All referenced segments. Dropping the last reference frees the blocks.

    A reference to a segment includes the whole path before it. Segments of processed prompts stay cached for prompts
    with the same prefix. Blocks that only the cache uses count as free; `make_room` frees them, least recently used
    first.
    """

    def __init__(self, placer: BlockPlacer, *, share_prefixes: bool = False) -> None:
        self._placer = placer
        self.holdings = SegmentPlacements(placer.windows)
        self._prefixes = PrefixIndex(placer.block_size, self.holdings, is_shared=share_prefixes)
        self._cached: OrderedDict[int, SegmentPlacement] = OrderedDict()
        self._next_id = 0
        self._num_evicted = 0
        """Number of evictions so far."""
        self._forgotten: list[int] = []
        self.num_reclaimable = BlockCount()
        """Blocks that `make_room` can free without evicting contexts."""
        self.evict: Callable[[BlockCount], bool] = no_eviction
        """Evicts contexts until so many more blocks are free or reclaimable; returns False if that is not possible."""

    def create(self, before: TokenPath, rope: Rope = OWN_ROPE, tenant: str = DEFAULT_TENANT) -> SegmentPlacement:
        """Creates a growing segment of a tenant, with one reference, which belongs to the caller. The path before it
        must have the same rope."""
        holding = SegmentPlacement(Segment(self._next_id, before, rope, tenant))
        self.holdings.add(holding)
        self._next_id += 1
        return holding

    def close(self, segment: Segment) -> None:
        """Ends a segment's growth. Frees the windows that are seen neither by the next token nor from a seam of the
        segment."""
        holding, segment.is_sealed = self.holdings[segment], True
        place = min(segment.end, holding.first_seam)
        holding.window_runs = self._placer.window_pool.trim(holding.window_runs, place)

    def seal(self, segment: Segment) -> None:
        """Closes a segment and adds it to the prefix cache."""
        self.close(segment)
        self._prefixes.add(segment)

    def retain(self, path: TokenPath, origin: TokenPath = EMPTY_PATH) -> None:
        """Adds references to the segments of a path after its prefix `origin`, which the caller references already, and
        holds the windows that the path's next token sees."""
        for holding in self.holdings.of(path.segments[len(origin.segments) :]):
            self._refer(holding, 1, 0)
        self.hold(path, path.end)

    def release(self, path: TokenPath, origin: TokenPath = EMPTY_PATH) -> None:
        """Reverts `retain`. Unreferenced segments are freed, and the next plan makes the ranks forget them."""
        self.unpin(path, path.end)
        # in reverse order: the lost ranges of a segment hold a position on the segments before it
        for holding in self.holdings.of(reversed(path.segments[len(origin.segments) :])):
            self._refer(holding, -1, 0)

    def drop(self, segment: Segment) -> None:
        """Drops the reference with which the segment was created."""
        self._refer(self.holdings[segment], -1, 0)

    def hold(self, path: TokenPath, end: int) -> None:
        """Holds the windows that a token at `end` sees. The caller must reference the path."""
        for holding in self.holdings.of(path.seen(end, self._placer.windows)):
            holding.seams[end] += 1

    def unpin(self, path: TokenPath, end: int) -> None:
        """Reverts `hold`. Frees windows that are seen from no other position."""
        for holding in self.holdings.of(path.seen(end, self._placer.windows)):
            holding.seams[end] -= 1
            if not holding.seams[end]:
                del holding.seams[end]
                self.trim(holding)

    def trim(self, holding: SegmentPlacement) -> None:
        """Frees the windows of a segment before those that its first seam sees."""
        self.num_reclaimable -= holding.num_reclaimable
        pool, segment, first_seam = self._placer.window_pool, holding.segment, holding.first_seam
        trimmed = pool.trim(holding.window_runs, first_seam if segment.is_sealed else min(segment.end, first_seam))
        if holding.loss is not None and holding.loss.promise is not None:  # more blocks are needed to recompute it
            freed = BlockCount(windows=count_blocks(holding.window_runs) - count_blocks(trimmed))
            self._placer.add(holding.loss.promise, freed)
        holding.window_runs = trimmed
        self.num_reclaimable += holding.num_reclaimable

    def _refer(self, holding: SegmentPlacement, references: int, retained: int) -> None:
        may_be_reclaimable = (
            retained or holding.num_cache_references
        )  # usually neither, and a path may have thousands of segments
        if may_be_reclaimable:
            self.num_reclaimable -= holding.num_reclaimable
        holding.num_references += references
        holding.num_cache_references += retained
        if may_be_reclaimable:
            self.num_reclaimable += holding.num_reclaimable
        if holding.num_references == 0:
            self._free(holding)
        elif references < 0:
            self._evict_idle(holding)

    def _free(self, holding: SegmentPlacement) -> None:
        self.end_loss(holding)
        self._end_eviction(holding)
        self.holdings.remove(holding)
        self._prefixes.remove(holding.segment)
        self._placer.free((*holding.runs, *holding.window_runs, *holding.incoming))
        self._forget(holding)
        holding.incoming = ()

    def _forget(self, holding: SegmentPlacement) -> None:
        """Makes the ranks forget a segment. A segment without tokens was never in a plan, so no rank knows it."""
        if holding.is_reported and holding.segment.token_ids:
            self._forgotten.append(holding.segment.id)
        holding.is_reported = False

    # --- eviction ---

    def adopt(self, segment: Segment) -> None:
        """Adds a sealed segment with no keys held and no references yet. The caller must add references of evicted
        contexts."""
        holding = SegmentPlacement(segment)
        holding.num_references, holding.is_reported, segment.is_sealed, segment.is_adopted = 0, False, True, True
        self.holdings.add(holding)
        self._begin_eviction(holding)
        self._prefixes.add(segment)
        self._next_id = max(self._next_id, segment.id + 1)

    def begin_ids(self, next_id: int) -> None:
        """Assigns segment ids from `next_id` on: lower ids belong to an earlier service process."""
        self._next_id = max(self._next_id, next_id)

    def take_ids(self, count: int) -> int:
        """Reserves `count` consecutive ids for segments that will be adopted. Returns the first one."""
        first_id, self._next_id = self._next_id, self._next_id + count
        return first_id

    def release_to_idle(self, path: TokenPath) -> None:
        """Marks one reference to each segment of a path as that of an evicted context. Evicts segments that nothing
        else needs."""
        for holding in self.holdings.of(path.segments):
            holding.num_idle_references += 1
            self._evict_idle(holding)

    def activate(self, path: TokenPath) -> None:
        """Reverts `rest`. Evicted segments of the path stay evicted until `call`."""
        for holding in self.holdings.of(path.segments):
            holding.num_idle_references -= 1

    def _evict_idle(self, holding: SegmentPlacement) -> None:
        """Evicts a segment if only evicted contexts refer to it and it can be recomputed from its start."""
        if not holding.is_idle or holding.is_evicted or not self._can_recompute(holding.segment):
            return
        self.drop_cached(lambda path: holding.segment in path.segments)
        if holding.is_evicted:  # evicted while the last cached prompt was dropped
            return
        self.end_loss(holding)
        self._placer.free((*holding.runs, *holding.window_runs, *holding.incoming))
        self._forget(holding)
        holding.runs, holding.window_runs, holding.incoming, holding.num_sharded = [], (), (), 0
        self._begin_eviction(holding)
        if self._placer.windows is not None:  # their eviction may have depended on this one
            for other in self.holdings:
                if other.segment.before.segments[-1:] == (holding.segment,):
                    self._evict_idle(other)

    def _can_recompute(self, segment: Segment) -> bool:
        """Whether a segment can be recomputed from its start, without any other or together with those before it."""
        if self._placer.windows is None or not self.holdings.holds(segment.before):
            return True
        return self.holdings.seams(segment.before, segment.start)[0] == segment.start

    def _begin_eviction(self, holding: SegmentPlacement) -> None:
        self.holdings.mark_evicted(holding, is_evicted=True)
        self._num_evicted += 1
        holding.version = self._num_evicted
        self.hold(holding.segment.before, holding.segment.start)

    def _end_eviction(self, holding: SegmentPlacement) -> None:
        if holding.is_evicted:
            self.holdings.mark_evicted(holding, is_evicted=False)
            self.unpin(holding.segment.before, holding.segment.start)

    def begin_reload(self, holding: SegmentPlacement) -> None:
        """Starts the reload of an evicted segment: all of it counts as lost from now on."""
        segment = holding.segment
        self.holdings.mark_evicted(holding, is_evicted=False)
        self.begin_loss(holding, LostRanges([(segment.start, segment.end)]))
        assert holding.loss is not None
        holding.loss.front = segment.start  # held since the eviction

    # --- lost ranges ---

    def begin_loss(self, holding: SegmentPlacement, loss: LostRanges) -> None:
        """Sets the lost ranges of a segment, replacing earlier ones."""
        self.end_loss(holding)
        self.holdings.note_loss(holding, loss)

    def add_frontier(self, holding: SegmentPlacement, position: int) -> None:
        """Holds the windows from which the segment is recomputed, at this position of its path."""
        loss, path = holding.loss, holding.segment.path
        assert loss is not None
        self.hold(path, position)
        if loss.front is not None:
            self.unpin(path, loss.front)
        loss.front = position

    def end_loss(self, holding: SegmentPlacement) -> None:
        """Clears the lost ranges of a segment and releases their reservation."""
        if (loss := holding.loss) is None:
            return
        self.holdings.note_loss(holding, None)
        if loss.promise is not None:
            self._placer.release(loss.promise)
        self._release_frontier(holding, loss)

    def drop_frontier(self, holding: SegmentPlacement) -> None:
        """Frees the windows that were held only to recompute the segment, all of which is held again."""
        assert holding.loss is not None
        self._release_frontier(holding, holding.loss)
        self.trim(holding)

    def _release_frontier(self, holding: SegmentPlacement, loss: LostRanges) -> None:
        if loss.front is not None:
            self.unpin(holding.segment.path, loss.front)
            loss.front = None

    def drop_cached(self, is_lost: Callable[[TokenPath], bool]) -> None:
        """Drops the cached prompts whose paths `is_lost` selects."""
        for segment in [segment for segment in self.cached if is_lost(segment.path)]:
            self._forget_cached(segment)

    # --- statistics ---

    def tokens_by_rank(self) -> list[int]:
        """Number of tokens on each rank whose keys contexts and jobs need. Segments that are only cached are not
        counted."""
        resident = [0] * len(self._placer.pools)
        for run in (run for holding in self._needed() for run in holding.runs):
            resident[run.rank] += len(run)
        return resident

    @property
    def cached(self) -> Iterator[Segment]:
        """The last segments of cached prompts."""
        return (holding.segment for holding in self._cached.values())

    @property
    def num_window_tokens(self) -> int:
        """Number of these tokens in the window pool."""
        return sum(len(run) for holding in self._needed() for run in holding.window_runs)

    def _needed(self) -> Iterator[SegmentPlacement]:
        return (holding for holding in self.holdings if holding.num_references > holding.num_cache_references)

    def take_forgotten(self) -> tuple[int, ...]:
        """Removes and returns the segment ids for the next plan's release_segments."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten

    # --- cached prompts ---

    def match(self, token_ids: "array[int]", rope: Rope = OWN_ROPE, tenant: str = DEFAULT_TENANT) -> TokenPath:
        """The longest cached path that is a prefix of `token_ids` with `rope`, that the tenant may find, and that can
        be continued; empty if there is none. The path is marked as used."""
        path = self._prefixes.match(token_ids, rope, tenant)
        self._touch(path)
        return path

    def cache(self, segment: Segment) -> None:
        """Closes the segment of a prompt, and caches it unless it adds nothing to the prefix cache."""
        self.close(segment)
        size = self._placer.block_size
        is_short = segment.start // size == segment.end // size
        found = (
            TokenPath() if is_short else self._prefixes.match(segment.path.token_ids(), segment.rope, segment.tenant)
        )
        if is_short or found.end == segment.end:
            return
        self.seal(segment)
        self._cached[segment.id] = self.holdings[segment]
        for part in self.holdings.of(segment.path.segments):
            self._refer(part, 1, 1)
        self.hold(segment.path, segment.end)
        self._touch(segment.path)

    def _touch(self, path: TokenPath) -> None:
        """Marks a path as most recently used, its first segments as more recent than its last ones."""
        for segment in reversed(path.segments):
            if segment.id in self._cached:
                self._cached.move_to_end(segment.id)

    def make_room(self, blocks: BlockCount, *, may_park: bool = True) -> bool:
        """Frees blocks until `blocks` are free. Returns False, and frees nothing, if that is not possible. With
        `may_park`, contexts may be evicted."""
        lacking = blocks - self._placer.num_free - self.num_reclaimable
        if not lacking.fits(BlockCount()) and not (may_park and self.evict(lacking)):
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
        self.unpin(segment.path, segment.end)
        for part in self.holdings.of(segment.path.segments):
            self._refer(part, -1, -1)

    def audit(self) -> None:
        """Asserts that all segments and placements are valid, that the path before each segment exists, and that counts
        match."""
        retained = [part.id for segment in self.cached for part in segment.path.segments]
        for holding in self.holdings:
            segment = holding.segment
            segment.audit()
            holding.audit()
            path = segment.path if segment.token_ids else segment.before
            path.audit() if segment.is_sealed else self.holdings.audit(path)
            before = self.holdings.of(segment.before.segments)
            assert all(part.num_references >= holding.num_references for part in before)
            assert holding.num_cache_references == retained.count(segment.id)
        alive = [holding.segment for holding in self.holdings]
        self._prefixes.audit(alive)
        assert set(retained) <= {segment.id for segment in alive}
        assert self.num_reclaimable == sum((holding.num_reclaimable for holding in self.holdings), BlockCount())
