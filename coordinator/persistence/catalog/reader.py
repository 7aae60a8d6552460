"""Reads the records of a database and separates damaged ones."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, select

from coordinator.persistence.catalog import row_codec
from coordinator.persistence.catalog.records import CatalogContents
from coordinator.persistence.catalog.row_codec import Found
from coordinator.persistence.catalog.sqlite_errors import damaged
from coordinator.persistence.catalog.tables import (
    COUNTERS,
    contexts,
    outbox,
    segment_ids,
    segment_texts,
    segments,
    service,
    snapshots,
    uploads,
)
from longleaf.document_text import DocumentText
from longleaf.storage.segment_record import SegmentRecord

T = TypeVar("T")
DAMAGED_ROW = "its record is damaged"


def load_names(connection: Connection) -> tuple[str, ...]:
    """Reads the ids of all contexts, including damaged ones."""
    return tuple(connection.execute(select(contexts.c.id).order_by(contexts.c.id)).scalars())


def load(path: Path, connection: Connection) -> CatalogContents:
    """Reads all records. Raises CatalogError when the counters are damaged, because ids could be reused."""
    state = connection.execute(select(service)).mappings().one_or_none()
    if state is None or not row_codec.checksum_matches(service, state):
        raise damaged(path, "its counters are damaged")
    other: list[str] = []
    texts, lost = _split(connection, segment_texts, row_codec.text_of)
    other += [f"the text of segment {row['segment']}" for row in lost]
    kept_segments, lost_segments = _segments(connection, dict(texts))
    kept_contexts, lost_contexts = _split(connection, contexts, row_codec.context_of)
    kept_snapshots, lost = _split(connection, snapshots, row_codec.snapshot_of)
    other += [f"the snapshot of segment {row['segment']}" for row in lost]
    kept_uploads, lost = _split(connection, uploads, row_codec.upload_of)
    other += [f"upload {row['upload_id']} of contexts/{row['context']}" for row in lost]
    _, lost = _split(connection, outbox, row_codec.outgoing_of)
    other += [f"the outbox entry {row['name']}" for row in lost]
    return CatalogContents(
        segments=tuple(kept_segments),
        contexts=tuple(kept_contexts),
        snapshots=tuple(kept_snapshots),
        uploads=tuple(kept_uploads),
        **{name: state[name] for name in COUNTERS},
        damaged=lost_segments,
        damaged_contexts={str(row["id"]): DAMAGED_ROW for row in lost_contexts},
        other_damage=tuple(other),
    )


def _rows(connection: Connection, table: Table) -> Iterator[Found]:
    yield from connection.execute(select(table).order_by(*table.primary_key.columns)).mappings()


def _split(connection: Connection, table: Table, make: Callable[[Found], T]) -> tuple[list[T], list[Found]]:
    """The records of the intact rows, and the damaged rows."""
    retained: list[T] = []
    lost: list[Found] = []
    for row in _rows(connection, table):
        if row_codec.checksum_matches(table, row):
            retained.append(make(row))
        else:
            lost.append(row)
    return retained, lost


def _segments(connection: Connection, texts: Mapping[int, DocumentText]) -> tuple[list[SegmentRecord], dict[int, str]]:
    """The intact records, and the reason for each other segment: its row or its token ids are damaged."""
    pieces: defaultdict[Any, list[Found]] = defaultdict(list)
    for piece in _rows(connection, segment_ids):
        pieces[piece["segment"]].append(piece)
    whole, lost_rows = _split(connection, segments, lambda row: row)
    retained: list[SegmentRecord] = []
    lost = {row["id"]: DAMAGED_ROW for row in lost_rows}
    for row in whole:
        try:
            retained.append(row_codec.segment_of(row, _take(pieces, row), texts.get(row["id"])))
        except ValueError as error:
            lost[row["id"]] = str(error)
    return retained, lost


def _take(pieces: "defaultdict[Any, list[Found]]", row: Found) -> "array[int]":
    """The token ids of a segment, whose pieces are removed from `pieces`. Raises ValueError."""
    return row_codec.join_chunks(segment_ids, pieces.pop(row["id"], []), row["num_tokens"])
