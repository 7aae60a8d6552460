"""The KV cache as the coordinator plans it: blocks, segments and contexts."""

from dataclasses import dataclass

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.contexts import ContextTable
from coordinator.kv_cache.eviction import ContextEvictor
from coordinator.kv_cache.segments import SegmentStore


@dataclass(frozen=True)
class KvCache:
    """The tables of the KV cache on all ranks."""

    placer: BlockPlacer
    segments: SegmentStore
    contexts: ContextTable
    evictor: ContextEvictor | None
    """None if contexts cannot be evicted."""
