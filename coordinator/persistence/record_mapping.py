"""Conversion of contexts and segments to stored records, and back."""

from collections.abc import Sequence

from msgspec.structs import replace

from coordinator.kv_cache.contexts import LAST_ENDS, NamedContext
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.persistence.catalog.records import Change, ContextRecord, SegmentRecord, SnapshotRecord
from longleaf.storage.context_metadata import metadata_fields, sound_ends


def context_record(context: NamedContext) -> ContextRecord:
    """The stored record of a context, without its segments."""
    return ContextRecord(
        id=context.id,
        segment=context.path.segments[-1].id,
        last_used=context.used,
        num_hits=context.num_hits,
        upload_id=context.upload_id,
        **metadata_fields(context),
    )


def context_of(record: ContextRecord, path: TokenPath) -> NamedContext:
    """Restores a context from its record, on its path."""
    context = NamedContext(record.id, record.created, path, record.capacity)
    ends = sound_ends(record.ends, record.num_tokens) or (record.num_tokens,)  # early versions imported invalid values
    context.ends, context.updated = ends[-LAST_ENDS:], record.updated
    context.display_name, context.is_pinned, context.expires = record.display_name, record.is_pinned, record.expires
    context.used, context.num_hits, context.upload_id = record.last_used, record.num_hits, record.upload_id
    return context


def renumbered(
    record: ContextRecord, path: Sequence[SegmentRecord], snapshots: Sequence[SnapshotRecord], first_id: int
) -> Change:
    """Stored records of a context from another catalog: its segments get the ids from `first_id` on, in path order."""
    ids = {segment.id: first_id + i for i, segment in enumerate(path)}
    parents = [None, *ids.values()]
    segments = [replace(each, id=ids[each.id], parent=parent) for each, parent in zip(path, parents, strict=False)]
    return Change(
        segments=tuple(segments),
        contexts=(replace(record, segment=segments[-1].id),),
        snapshots=tuple(replace(each, segment=ids[each.segment]) for each in snapshots),
    )
