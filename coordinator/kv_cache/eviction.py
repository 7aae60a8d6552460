"""Eviction: idle contexts release their blocks when space is needed, and are reloaded on the next request."""

from collections import Counter
from collections.abc import Callable, Container, Iterable

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment


class ContextEvictor:
    """Evicts contexts when space is needed, least recently used first. Pinned contexts and those `in_use` stay."""

    def __init__(
        self,
        placer: BlockPlacer,
        segments: SegmentStore,
        contexts: ContextTable,
        in_use: Callable[[], Container[str | None]],
    ) -> None:
        self._placer = placer
        self._segments = segments
        self._contexts = contexts
        self._in_use = in_use
        """Returns the ids of contexts that jobs query or ingest into."""

    def free_blocks(self, lacking: BlockCount) -> bool:
        """Evicts contexts until so many more blocks are free or reclaimable. Returns False, and evicts nothing, if that
        is not possible."""
        spare = self._spare()
        if not lacking.fits(self._segments.num_freed(_references(spare))):
            return False
        wanted = self._num_room + lacking
        for group in self._groups(spare):
            if not wanted.fits(self._num_room):
                for context in group:
                    self._contexts.evict(context)
        return wanted.fits(self._num_room)

    def _groups(self, spare: list[NamedContext]) -> list[list[NamedContext]]:
        """Contexts that are evicted together, least recently used first."""
        groups: dict[object, list[NamedContext]] = {}
        for context in spare:
            key = context.id if self._placer.windows is None else context.path.segments[0]
            groups.setdefault(key, []).append(context)
        return sorted(groups.values(), key=lambda group: max(context.last_use for context in group))

    def evict_unreserved(self) -> None:
        """Evicts idle contexts that have lost keys and no blocks reserved to recompute them."""
        in_use = self._in_use()
        for context in self._contexts.list():
            placements = self._segments.placements.for_segments(context.path.segments)
            has_no_room = any(one.loss is not None and one.loss.reservation is None for one in placements)
            if has_no_room and not context.is_evicted and context.id not in in_use:
                self._contexts.evict(context)

    def evict_lost(self, contexts: Iterable[NamedContext]) -> bool:
        """Evicts those of `contexts` that have lost keys, unless they are pinned or in use. Returns whether there are
        any."""
        lost = [context for context in contexts if not self._segments.placements.holds(context.path)]
        bound = self._contexts.bound(self._in_use()) if lost else []
        evicted = [context for context in lost if context not in bound]
        for context in evicted:
            self._contexts.evict(context)
        return bool(evicted)

    def spare_references(self) -> Counter[Segment]:
        """Number of references by segment that evictable contexts have."""
        return _references(self._spare())

    @property
    def _num_room(self) -> BlockCount:
        return self._placer.num_free + self._segments.num_reclaimable

    def _spare(self) -> list[NamedContext]:
        bound = {context.id for context in self._contexts.bound(self._in_use())}
        return [one for one in self._contexts.list() if not (one.is_evicted or one.id in bound)]


def _references(contexts: list[NamedContext]) -> Counter[Segment]:
    return Counter(segment for context in contexts for segment in context.path.segments)
