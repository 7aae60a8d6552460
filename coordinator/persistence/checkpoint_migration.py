"""Contexts that an earlier checkpoint ingested: they are read from its folder, and cut for the served checkpoint."""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set

from msgspec.structs import replace

from coordinator.kv_cache.positions import Positions
from coordinator.persistence.catalog.stale_contexts import StaleContext, StaleContexts
from longleaf.errors import CheckpointChanged
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.segment_record import SegmentRecord, with_ends
from longleaf.tenants import tenant_of


class CheckpointMigration:
    """Finds contexts in the folders of earlier checkpoints. These folders are never written. `wall_clock` decides which
    contexts have expired.
    """

    def __init__(self, stale: StaleContexts, wall_clock: Callable[[], float]) -> None:
        self._stale = stale
        self._wall_clock = wall_clock
        self._names = frozenset(stale.changed)
        """The names of all contexts that existed when the service started."""
        self._running_read: asyncio.Task[Mapping[str, StaleContext]] | None = None
        """The running read. It reads all folders in full, is shared by all concurrent callers, and completes even if
        all of them are cancelled.
        """

    def names(self, tenant: str) -> list[str]:
        """Return the sorted names of a tenant's contexts."""
        return sorted(name for name in self._names if tenant_of(name) == tenant)

    async def find(self, names: Set[str]) -> Mapping[str, StaleContext]:
        """Return the unexpired contexts of these names."""
        if not names & self._names:
            return {}
        if self._running_read is None:
            self._running_read = asyncio.create_task(asyncio.to_thread(self._stale.read))
            self._running_read.add_done_callback(self._clear_read)
        now, found = self._wall_clock(), await asyncio.shield(self._running_read)
        past = {name for name, each in found.items() if (expiry := each.record.expiry) is not None and expiry <= now}
        return {name: each for name, each in found.items() if name in names - past}

    def _clear_read(self, task: asyncio.Task[Mapping[str, StaleContext]]) -> None:
        self._running_read = None
        if not task.cancelled():
            task.exception()  # retrieved here, because asyncio logs the error if all callers were cancelled


def retokenized(
    found: StaleContext, positions: Positions, vocabulary_size: int
) -> tuple[ContextRecord, Sequence[SegmentRecord]]:
    """Return the context and its path with the RoPE of this checkpoint. Each segment ends where the next one of the
    path starts. The context keeps its capacity if this checkpoint allows it. Raises CheckpointChanged if this
    checkpoint cannot use the tokens, and DataLoss.
    """
    record, path, name = found.record, found.path, f"contexts/{found.record.id}"
    if found.has_other_text:
        changed = f"{', '.join(found.differing)} in {found.model} changed after it was ingested"
        raise CheckpointChanged(name, f"{changed}, so its token ids may have another meaning: ingest the text again")
    declared = record.capacity if record.capacity <= positions.limit else None
    capacity = positions.capacity(record.num_tokens, declared)
    if capacity < record.num_tokens:
        message = f"it has {record.num_tokens:,} tokens; this checkpoint allows {capacity:,}, {positions.limit_name}"
        raise CheckpointChanged(name, message)
    rope = positions.rope(capacity)
    cut = [replace(_cut(each, end), rope=rope) for each, end in with_ends(path, record.num_tokens)]
    if (largest := max(max(each.token_ids) for each in cut)) >= vocabulary_size:
        raise CheckpointChanged(name, f"it has token {largest:,}; this checkpoint has {vocabulary_size:,} tokens")
    return replace(record, capacity=capacity), cut


def _cut(segment: SegmentRecord, end: int) -> SegmentRecord:
    num_tokens = end - segment.start
    if num_tokens == len(segment.token_ids):
        return segment
    text = segment.text and segment.text.cut(num_tokens)
    return replace(segment, token_ids=segment.token_ids[:num_tokens], text=text)
