"""The segments that anybody refers to, and those of earlier prompts, kept while there is room."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer, count_blocks
from coordinator.kv_cache.lost_ranges import LostRanges
from coordinator.kv_cache.prefix_cache import PrefixIndex
from coordinator.kv_cache.segment_placement import SegmentPlacement, SegmentPlacements
from coordinator.kv_cache.token_paths import NOWHERE, Segment, TokenPath
from longleaf.positions import OWN_ROPE, Rope
from longleaf.tenants import DEFAULT_TENANT


def nothing_more(lacking: BlockCount) -> bool:
    """Nothing can be parked."""
    del lacking
    return False


class SegmentStore:
    """All segments that anybody refers to. The last reference that goes frees the blocks.

    Who refers to a segment refers to the whole path before it as well. Segments of prompts that were read are kept for
    prompts that begin alike; blocks that nobody else needs are as good as free, and `make_room` frees them, those used
    least recently first.
    """

    def __init__(self, placer: BlockPlacer, *, share_prefixes: bool = False) -> None:
        self._placer = placer
        self.holdings = SegmentPlacements(placer.windows)
        self._prefixes = PrefixIndex(placer.block_size, self.holdings, is_shared=share_prefixes)
        self._kept: OrderedDict[int, SegmentPlacement] = OrderedDict()
        self._next_id = 0
        self._num_parked = 0
        """How often something was."""
        self._forgotten: list[int] = []
        self.num_reclaimable = BlockCount()
        """Blocks that `make_room` can free by itself."""
        self.make_more: Callable[[BlockCount], bool] = nothing_more
        """Sees to it that so many more blocks are free or reclaimable, or says that this cannot be."""

    def create(self, before: TokenPath, rope: Rope = OWN_ROPE, tenant: str = DEFAULT_TENANT) -> SegmentPlacement:
        """Holding of a new, growing segment of a tenant with one reference: the caller's. What it continues has the
        same rope."""
        holding = SegmentPlacement(Segment(self._next_id, before, rope, tenant))
        self.holdings.add(holding)
        self._next_id += 1
        return holding

    def close(self, segment: Segment) -> None:
        """Ends a segment's growth; what the token after its end does not see of its windows is freed, but for what is
        seen from where it is read again."""
        holding, segment.is_sealed = self.holdings[segment], True
        place = min(segment.end, holding.first_seam)
        holding.window_runs = self._placer.window_pool.trim(holding.window_runs, place)

    def seal(self, segment: Segment) -> None:
        """Closes a segment, and lets prompts find it."""
        self.close(segment)
        self._prefixes.add(segment)

    def retain(self, path: TokenPath, origin: TokenPath = NOWHERE) -> None:
        """Refers to the segments of a path, but for those of its beginning `origin`, to which the caller refers
        already, and holds what the path's next token sees of windows."""
        for holding in self.holdings.of(path.segments[len(origin.segments) :]):
            self._refer(holding, 1, 0)
        self.hold(path, path.end)

    def release(self, path: TokenPath, origin: TokenPath = NOWHERE) -> None:
        """Takes a retain back; what nobody refers to is freed and will be forgotten by the ranks."""
        self.let_go(path, path.end)
        # the end first: what is lost of a segment has a place on those before it
        for holding in self.holdings.of(reversed(path.segments[len(origin.segments) :])):
            self._refer(holding, -1, 0)

    def drop(self, segment: Segment) -> None:
        """Takes the reference back with which the segment was created."""
        self._refer(self.holdings[segment], -1, 0)

    def hold(self, path: TokenPath, end: int) -> None:
        """Keeps what a token at `end` sees of windows, a place on a path to which the caller refers."""
        for holding in self.holdings.of(path.seen(end, self._placer.windows)):
            holding.seams[end] += 1

    def let_go(self, path: TokenPath, end: int) -> None:
        """Takes a hold back; what is seen from no other place is freed."""
        for holding in self.holdings.of(path.seen(end, self._placer.windows)):
            holding.seams[end] -= 1
            if not holding.seams[end]:
                del holding.seams[end]
                self.trim(holding)

    def trim(self, holding: SegmentPlacement) -> None:
        """Frees the windows of a segment that are seen from none of its seams: from the first one most is seen."""
        self.num_reclaimable -= holding.num_reclaimable
        pool, segment, first_seam = self._placer.window_pool, holding.segment, holding.first_seam
        trimmed = pool.trim(holding.window_runs, first_seam if segment.is_sealed else min(segment.end, first_seam))
        if holding.loss is not None and holding.loss.promise is not None:  # more of it will be read again
            freed = BlockCount(windows=count_blocks(holding.window_runs) - count_blocks(trimmed))
            self._placer.add(holding.loss.promise, freed)
        holding.window_runs = trimmed
        self.num_reclaimable += holding.num_reclaimable

    def _refer(self, holding: SegmentPlacement, references: int, kept: int) -> None:
        may_be_reclaimable = kept or holding.num_kept  # mostly not, and a path may have thousands of segments
        if may_be_reclaimable:
            self.num_reclaimable -= holding.num_reclaimable
        holding.num_references += references
        holding.num_kept += kept
        if may_be_reclaimable:
            self.num_reclaimable += holding.num_reclaimable
        if holding.num_references == 0:
            self._free(holding)
        elif references < 0:
            self._park_resting(holding)

    def _free(self, holding: SegmentPlacement) -> None:
        self.end_loss(holding)
        self._end_parking(holding)
        self.holdings.remove(holding)
        self._prefixes.remove(holding.segment)
        self._placer.free((*holding.runs, *holding.window_runs, *holding.arriving))
        self._forget(holding)
        holding.arriving = ()

    def _forget(self, holding: SegmentPlacement) -> None:
        """Has the ranks forget a segment. One without tokens was never in a plan, so that none knows it."""
        if holding.is_told and holding.segment.token_ids:
            self._forgotten.append(holding.segment.id)
        holding.is_told = False

    # --- what rests ---

    def adopt(self, segment: Segment) -> None:
        """Takes in a sealed segment of which nothing is held. Nobody refers to it yet; contexts that rest must."""
        holding = SegmentPlacement(segment)
        holding.num_references, holding.is_told, segment.is_sealed, segment.is_adopted = 0, False, True, True
        self.holdings.add(holding)
        self._begin_parking(holding)
        self._prefixes.add(segment)
        self._next_id = max(self._next_id, segment.id + 1)

    def begin_ids(self, next_id: int) -> None:
        """Segments get ids from `next_id` on: those before were another service's."""
        self._next_id = max(self._next_id, next_id)

    def take_ids(self, count: int) -> int:
        """So many ids are for segments that will be adopted; the first of them, which others follow."""
        first_id, self._next_id = self._next_id, self._next_id + count
        return first_id

    def rest(self, path: TokenPath) -> None:
        """Whoever refers to a path with one of its references needs no keys of it for now: what nobody else needs is
        parked."""
        for holding in self.holdings.of(path.segments):
            holding.num_resting += 1
            self._park_resting(holding)

    def wake(self, path: TokenPath) -> None:
        """Takes a rest back. What is parked of the path stays so until it is called."""
        for holding in self.holdings.of(path.segments):
            holding.num_resting -= 1

    def _park_resting(self, holding: SegmentPlacement) -> None:
        """Parks a segment if only contexts that rest refer to it, and it can be read again from where it begins."""
        if not holding.is_resting or holding.is_parked or not self._can_begin_anew(holding.segment):
            return
        self.drop_kept(lambda path: holding.segment in path.segments)
        if holding.is_parked:  # by who let go of it last
            return
        self.end_loss(holding)
        self._placer.free((*holding.runs, *holding.window_runs, *holding.arriving))
        self._forget(holding)
        holding.runs, holding.window_runs, holding.arriving, holding.num_sharded = [], (), (), 0
        self._begin_parking(holding)
        if self._placer.windows is not None:  # others may have waited for this
            for other in self.holdings:
                if other.segment.before.segments[-1:] == (holding.segment,):
                    self._park_resting(other)

    def _can_begin_anew(self, segment: Segment) -> bool:
        """Whether a segment can be read again without any other, or together with those before it."""
        if self._placer.windows is None or not self.holdings.holds(segment.before):
            return True
        return self.holdings.seams(segment.before, segment.start)[0] == segment.start

    def _begin_parking(self, holding: SegmentPlacement) -> None:
        self.holdings.note_parked(holding, is_parked=True)
        self._num_parked += 1
        holding.version = self._num_parked
        self.hold(holding.segment.before, holding.segment.start)

    def _end_parking(self, holding: SegmentPlacement) -> None:
        if holding.is_parked:
            self.holdings.note_parked(holding, is_parked=False)
            self.let_go(holding.segment.before, holding.segment.start)

    def call(self, holding: SegmentPlacement) -> None:
        """A parked segment is needed: all of it is lost from now on."""
        segment = holding.segment
        self.holdings.note_parked(holding, is_parked=False)
        self.begin_loss(holding, LostRanges([(segment.start, segment.end)]))
        assert holding.loss is not None
        holding.loss.front = segment.start  # held since it was parked

    # --- what is lost ---

    def begin_loss(self, holding: SegmentPlacement, loss: LostRanges) -> None:
        """Notes what is lost of a segment, in place of what was noted before."""
        self.end_loss(holding)
        self.holdings.note_loss(holding, loss)

    def hold_front(self, holding: SegmentPlacement, position: int) -> None:
        """Keeps the windows from which the segment is read again, which is at this position of its path."""
        loss, path = holding.loss, holding.segment.path
        assert loss is not None
        self.hold(path, position)
        if loss.front is not None:
            self.let_go(path, loss.front)
        loss.front = position

    def end_loss(self, holding: SegmentPlacement) -> None:
        """Nothing is lost of a segment any more, or nobody needs it; what is left of its promise is given back."""
        if (loss := holding.loss) is None:
            return
        self.holdings.note_loss(holding, None)
        if loss.promise is not None:
            self._placer.release(loss.promise)
        self._let_front_go(holding, loss)

    def drop_front(self, holding: SegmentPlacement) -> None:
        """Keeps of the windows of a segment only what is seen from elsewhere: all of it is held again."""
        assert holding.loss is not None
        self._let_front_go(holding, holding.loss)
        self.trim(holding)

    def _let_front_go(self, holding: SegmentPlacement, loss: LostRanges) -> None:
        if loss.front is not None:
            self.let_go(holding.segment.path, loss.front)
            loss.front = None

    def drop_kept(self, is_lost: Callable[[TokenPath], bool]) -> None:
        """Forgets prompts that are kept for others where something of their paths is lost."""
        for segment in [segment for segment in self.kept if is_lost(segment.path)]:
            self._forget_kept(segment)

    # --- what is held ---

    def tokens_by_rank(self) -> list[int]:
        """Tokens whose keys and values each rank holds for contexts and jobs: what is only kept is as good as free."""
        resident = [0] * len(self._placer.pools)
        for run in (run for holding in self._needed() for run in holding.runs):
            resident[run.rank] += len(run)
        return resident

    @property
    def kept(self) -> Iterator[Segment]:
        """The ends of prompts that are kept for others."""
        return (holding.segment for holding in self._kept.values())

    @property
    def num_window_tokens(self) -> int:
        """How many of these tokens lie in the windows' pool."""
        return sum(len(run) for holding in self._needed() for run in holding.window_runs)

    def _needed(self) -> Iterator[SegmentPlacement]:
        return (holding for holding in self.holdings if holding.num_references > holding.num_kept)

    def take_forgotten(self) -> tuple[int, ...]:
        """Ids for the next plan's release_segments; each is given once."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten

    # --- prompts ---

    def match(self, token_ids: "array[int]", rope: Rope = OWN_ROPE, tenant: str = DEFAULT_TENANT) -> TokenPath:
        """The longest path found that `token_ids`, rotated by `rope`, begin with, that the tenant may find and that can
        be continued, which counts as used; empty when there is none."""
        path = self._prefixes.match(token_ids, rope, tenant)
        self._touch(path)
        return path

    def keep(self, segment: Segment) -> None:
        """Closes the segment of a prompt, and keeps it for prompts to come unless they could not find anything new."""
        self.close(segment)
        size = self._placer.block_size
        is_short = segment.start // size == segment.end // size
        found = (
            TokenPath() if is_short else self._prefixes.match(segment.path.token_ids(), segment.rope, segment.tenant)
        )
        if is_short or found.end == segment.end:
            return
        self.seal(segment)
        self._kept[segment.id] = self.holdings[segment]
        for part in self.holdings.of(segment.path.segments):
            self._refer(part, 1, 1)
        self.hold(segment.path, segment.end)
        self._touch(segment.path)

    def _touch(self, path: TokenPath) -> None:
        """Makes a path the most recently used one, its beginning even more so than its end."""
        for segment in reversed(path.segments):
            if segment.id in self._kept:
                self._kept.move_to_end(segment.id)

    def make_room(self, blocks: BlockCount, *, may_park: bool = True) -> bool:
        """Sees to it that so many blocks are free, or says that this cannot be, and then frees none."""
        lacking = blocks - self._placer.num_free - self.num_reclaimable
        if not lacking.fits(BlockCount()) and not (may_park and self.make_more(lacking)):
            return False
        while not blocks.fits(self._placer.num_free):
            self._forget_kept(
                next(
                    retained.segment for retained in self._kept.values() if retained.num_kept == retained.num_references
                )
            )
        return True

    def _forget_kept(self, segment: Segment) -> None:
        del self._kept[segment.id]
        self.let_go(segment.path, segment.end)
        for part in self.holdings.of(segment.path.segments):
            self._refer(part, -1, -1)

    def audit(self) -> None:
        """Segments and what is held of them are sound; what they continue is alive; what is kept is counted."""
        retained = [part.id for segment in self.kept for part in segment.path.segments]
        for holding in self.holdings:
            segment = holding.segment
            segment.audit()
            holding.audit()
            path = segment.path if segment.token_ids else segment.before
            path.audit() if segment.is_sealed else self.holdings.audit(path)
            before = self.holdings.of(segment.before.segments)
            assert all(part.num_references >= holding.num_references for part in before)
            assert holding.num_kept == retained.count(segment.id)
        alive = [holding.segment for holding in self.holdings]
        self._prefixes.audit(alive)
        assert set(retained) <= {segment.id for segment in alive}
        assert self.num_reclaimable == sum((holding.num_reclaimable for holding in self.holdings), BlockCount())
