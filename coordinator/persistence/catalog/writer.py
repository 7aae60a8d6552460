"""Reads and writes within a transaction: changes of contexts, uploads and the outbox."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Table, delete, insert, select, tuple_, update

from coordinator.persistence.catalog import row_codec
from coordinator.persistence.catalog.records import (
    CatalogContents,
    Change,
    CommitResult,
    OutboxEntry,
    SnapshotRecord,
    UploadKey,
    UploadRecord,
)
from coordinator.persistence.catalog.tables import (
    COUNTERS,
    contexts,
    outbox,
    segment_ids,
    segment_texts,
    segments,
    service,
    snapshots,
    upload_ids,
    upload_starts,
    uploads,
)
from longleaf.document_text import count_starts
from longleaf.errors import DataLoss, NotFound
from longleaf.storage.segment_record import SegmentRecord

MAX_BATCH = 500
"""Maximum number of keys per statement."""


def write_change(connection: Connection, change: Change) -> CommitResult:
    """Writes a whole change. Returns the deleted segments, and the manifests that no record names any more."""
    again = [record.segment for record in change.snapshots]
    manifests = _manifests(connection, [*change.dropped_snapshots, *again])
    _drop(connection, contexts, change.dropped_contexts)
    _drop(connection, snapshots, change.dropped_snapshots)
    for context in change.dropped_contexts:
        connection.execute(delete(uploads).where(uploads.c.context == context))
    for key in change.dropped_uploads:
        drop_upload(connection, key)
    for segment in change.segments:
        _add_segment(connection, segment)
    if change.next_segment:
        _raise_next_segment(connection, change.next_segment)
    _put(connection, contexts, [row_codec.context_row(record) for record in change.contexts])
    manifests |= _put_snapshots(connection, change.snapshots)
    gone, swept = _sweep(connection) if _may_leave_segments(change) else ((), set[str]())
    manifests |= swept
    manifests.difference_update(connection.execute(select(snapshots.c.manifest)).scalars() if manifests else ())
    _send(connection, [*change.outgoing, *(OutboxEntry(name, None) for name in sorted(manifests))])
    return CommitResult(gone, tuple(sorted(manifests)))


def _put_snapshots(connection: Connection, records: Sequence[SnapshotRecord]) -> set[str]:
    """Writes the snapshots of existing segments. Returns the manifests of the other snapshots."""
    wanted = segments.c.id.in_([record.segment for record in records])
    known = set(connection.execute(select(segments.c.id).where(wanted)).scalars()) if records else set[int]()
    _put(connection, snapshots, [row_codec.snapshot_row(record) for record in records if record.segment in known])
    return {record.manifest for record in records if record.segment not in known}


def _may_leave_segments(change: Change) -> bool:
    return bool(change.segments or change.contexts or change.dropped_contexts)


def _drop(connection: Connection, table: Table, keys: Sequence[Any]) -> None:
    """Deletes rows by the only column of their primary key."""
    (column,) = table.primary_key.columns
    for first in range(0, len(keys), MAX_BATCH):
        connection.execute(delete(table).where(column.in_(keys[first : first + MAX_BATCH])))


def _put(connection: Connection, table: Table, found: list[row_codec.Row]) -> None:
    """Inserts or replaces rows."""
    if found:
        connection.execute(insert(table).prefix_with("OR REPLACE"), found)


def _manifests(connection: Connection, of_segments: Sequence[int]) -> set[str]:
    found: set[str] = set()
    for first in range(0, len(of_segments), MAX_BATCH):
        some = snapshots.c.segment.in_(of_segments[first : first + MAX_BATCH])
        found |= set(connection.execute(select(snapshots.c.manifest).where(some)).scalars())
    return found


def _add_segment(connection: Connection, record: SegmentRecord) -> None:
    connection.execute(insert(segments), row_codec.segment_row(record))
    _add_pieces(connection, segment_ids, row_codec.piece_rows(segment_ids, {"segment": record.id}, record.token_ids))
    if record.text is not None:
        connection.execute(insert(segment_texts), row_codec.text_row(record.id, record.text))
    _raise_next_segment(connection, record.id + 1)


def _raise_next_segment(connection: Connection, number: int) -> None:
    state = _state(connection)
    if number > state["next_segment"]:
        _set_state(connection, {**state, "next_segment": number})


def _add_pieces(connection: Connection, table: Table, pieces: Iterable[row_codec.Row]) -> None:
    for piece in pieces:  # one piece at a time, so that the ids of a document are in memory only once
        connection.execute(insert(table), piece)


def _sweep(connection: Connection) -> tuple[tuple[int, ...], set[str]]:
    """Deletes the segments that are on no path of a context, with their ids and snapshots. Returns the segments and
    their manifests."""
    reached = select(contexts.c.segment.label("id")).cte("reached", recursive=True)
    parents = select(segments.c.parent).join(reached, segments.c.id == reached.c.id)
    reached = reached.union(parents.where(segments.c.parent.is_not(None)))
    unreached = segments.c.id.not_in(select(reached.c.id))
    gone = tuple(connection.execute(select(segments.c.id).where(unreached).order_by(segments.c.id)).scalars())
    manifests = _manifests(connection, gone)
    for first in range(0, len(gone), MAX_BATCH):
        connection.execute(delete(segments).where(segments.c.id.in_(gone[first : first + MAX_BATCH])))
    return gone, manifests


def _state(connection: Connection) -> row_codec.Row:
    """The row of the service. Raises DataLoss."""
    row = connection.execute(select(service)).mappings().one_or_none()
    if row is None or not row_codec.checksum_matches(service, row):
        raise DataLoss("the catalog", "its counters are damaged; restart the service and follow its message")
    return dict(row)


def _set_state(connection: Connection, row: row_codec.Row) -> None:
    connection.execute(update(service), row_codec.with_checksum(service, row))


def write_rebuilt(connection: Connection, contents: CatalogContents) -> None:
    """Writes all records of a rebuilt catalog into a new database."""
    write_change(
        connection, Change(segments=contents.segments, contexts=contents.contexts, snapshots=contents.snapshots)
    )
    _set_state(connection, _state(connection) | {name: getattr(contents, name) for name in COUNTERS})


def write_epoch(connection: Connection, epoch: int) -> None:
    """Writes the epoch, unless a greater one is stored."""
    state = _state(connection)
    _set_state(connection, {**state, "epoch": max(state["epoch"], epoch)})


# --- unfinished uploads ---


def append_upload(
    connection: Connection, record: UploadRecord, start: int, new_ids: "array[int]", new_starts: "array[int]"
) -> None:
    """Writes the upload's row, and appends ids to the first `start`, with their offsets. Raises NotFound if the
    upload was dropped, and DataLoss if it does not have `start` ids or its row is damaged."""
    row = _upload(connection, record.key)
    if row is None and start:
        raise NotFound(f"upload {record.upload_id} of contexts/{record.context}")
    if (num_tokens := row["num_tokens"] if row else 0) != start:
        raise _lost_upload(record.key, f"it has {num_tokens} token ids, and the next ones start at {start}")
    new = row_codec.upload_row(record, start + len(new_ids))
    if row:
        connection.execute(update(uploads).where(_is_upload(uploads, record.key)), new)
    else:
        connection.execute(insert(uploads), new)
    key = {"context": record.context, "upload_id": record.upload_id}
    _add_pieces(connection, upload_ids, row_codec.piece_rows(upload_ids, key, new_ids, start))
    _add_pieces(connection, upload_starts, row_codec.piece_rows(upload_starts, key, new_starts, count_starts(start)))


def read_upload(connection: Connection, key: UploadKey) -> "array[int]":
    """The ids of an upload; empty if it does not exist. Raises DataLoss."""
    row = _upload(connection, key)
    if row is None:
        return array("I")
    try:
        return row_codec.join_chunks(upload_ids, _pieces(connection, upload_ids, key), row["num_tokens"])
    except ValueError as error:
        raise _lost_upload(key, str(error)) from error


def read_upload_starts(connection: Connection, key: UploadKey) -> "array[int]":
    """The token offsets of an upload; empty if they are not stored. Raises DataLoss."""
    try:
        return row_codec.joined_starts(upload_starts, _pieces(connection, upload_starts, key))
    except ValueError as error:
        raise _lost_upload(key, str(error)) from error


def _pieces(connection: Connection, table: Table, key: UploadKey) -> Iterable[row_codec.Found]:
    return connection.execute(select(table).where(_is_upload(table, key)).order_by(table.c.start)).mappings()


def drop_upload(connection: Connection, key: UploadKey) -> None:
    """Deletes the row and the ids of an upload."""
    connection.execute(delete(uploads).where(_is_upload(uploads, key)))


def _is_upload(table: Table, key: UploadKey) -> Any:
    return tuple_(table.c.context, table.c.upload_id) == tuple_(*key)


def _upload(connection: Connection, key: UploadKey) -> row_codec.Row | None:
    row = connection.execute(select(uploads).where(_is_upload(uploads, key))).mappings().one_or_none()
    if row is not None and not row_codec.checksum_matches(uploads, row):
        raise _lost_upload(key, "its record is damaged")
    return None if row is None else dict(row)


def _lost_upload(key: UploadKey, reason: str) -> DataLoss:
    context, upload_id = key
    return DataLoss(f"upload {upload_id} of contexts/{context}", f"{reason}; restart the upload")


# --- outbox ---


def _send(connection: Connection, outgoing: Sequence[OutboxEntry]) -> None:
    if not outgoing:
        return
    state = _state(connection)
    for key, each in enumerate(outgoing, state["next_outgoing"]):
        _put(connection, outbox, [row_codec.outgoing_row(key, each)])
    _set_state(connection, {**state, "next_outgoing": state["next_outgoing"] + len(outgoing)})


def read_outgoing(connection: Connection, limit: int, only_deletions: bool) -> list[tuple[int, OutboxEntry]]:
    """The oldest `limit` entries, without damaged ones, each with its key."""
    found: list[tuple[int, OutboxEntry]] = []
    chosen = select(outbox).order_by(outbox.c.key)
    if only_deletions:
        chosen = chosen.where(outbox.c.content.is_(None))
    for row in connection.execute(chosen).mappings():
        if len(found) == limit:
            break
        if row_codec.checksum_matches(outbox, row):
            found.append(row_codec.outgoing_of(row))
    return found


def drop_outgoing(connection: Connection, keys: Sequence[int]) -> None:
    _drop(connection, outbox, keys)
