"""Conversion of records to table rows with a checksum, and back."""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from blake3 import blake3
from sqlalchemy import Table

from coordinator.persistence.catalog import tables
from coordinator.persistence.catalog.records import OutboxEntry, SnapshotRecord, UploadRecord
from longleaf.document_text import DocumentText
from longleaf.little_endian import pack, unpack
from longleaf.positions import Rope
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.segment_record import SegmentRecord

PIECE_IDS = 1 << 16
"""Maximum number of token ids per piece. A piece is one blob with one checksum."""
CHECKSUM_BYTES = 16
PADDING = bytes(tables.PAGE_BYTES)
Row = dict[str, Any]
Found = Mapping[Any, Any]
"""A row as read."""


def with_checksum(table: Table, row: Row) -> Row:
    """Adds the checksum to the row."""
    return {**row, "checksum": _checksum(table, row)}


def checksum_matches(table: Table, row: Found) -> bool:
    """Whether the checksum of the row is correct."""
    return row["checksum"] == _checksum(table, row)


def _checksum(table: Table, row: Found) -> bytes:
    values = [row[column.name] for column in table.columns if column.name != "checksum"]
    return blake3(msgspec.msgpack.encode((str(table.name), *values))).digest(length=CHECKSUM_BYTES)


def segment_row(record: SegmentRecord) -> Row:
    row: Row = {"id": record.id, "parent": record.parent, "start": record.start, "num_tokens": len(record.token_ids)}
    row |= {"scaled_for": record.rope.scaled_for, "is_double": int(record.rope.is_double)}
    return with_checksum(tables.segments, row)


def segment_of(row: Found, token_ids: "array[int]", text: DocumentText | None) -> SegmentRecord:
    rope = Rope(row["scaled_for"], bool(row["is_double"]))
    columns = {"id": row["id"], "parent": row["parent"], "start": row["start"]}
    return SegmentRecord(**columns, rope=rope, token_ids=token_ids, text=text)


def text_row(segment: int, text: DocumentText) -> Row:
    content = msgspec.msgpack.encode(text)
    return with_checksum(tables.segment_texts, {"segment": segment, "padding": PADDING, "content": content})


def text_of(row: Found) -> tuple[int, DocumentText]:
    """The id of the segment, and its text."""
    return row["segment"], msgspec.msgpack.decode(row["content"], type=DocumentText)


def context_row(record: ContextRecord) -> Row:
    row: Row = msgspec.structs.asdict(record)
    row |= {"ends": " ".join(map(str, record.ends)), "is_pinned": int(record.is_pinned)}
    # SQLite returns real numbers as floats: the checksum must be that of a float
    row |= {name: float(row[name]) for name in ("created", "updated", "last_used")}
    row["expires"] = None if record.expires is None else float(record.expires)
    row |= _private(record.display_name.encode()) | {"display_name": ""}
    return with_checksum(tables.contexts, row)


def context_of(row: Found) -> ContextRecord:
    fields: Row = {name: row[name] for name in ContextRecord.__struct_fields__}
    fields |= {"ends": tuple(map(int, row["ends"].split())), "is_pinned": bool(row["is_pinned"])}
    return ContextRecord(**fields | {"display_name": row["content"].decode()})


def _private(content: bytes) -> Row:
    return {"padding": PADDING if content else b"", "content": content}


def snapshot_row(record: SnapshotRecord) -> Row:
    return with_checksum(tables.snapshots, msgspec.structs.asdict(record))


def snapshot_of(row: Found) -> SnapshotRecord:
    return SnapshotRecord(**{name: row[name] for name in SnapshotRecord.__struct_fields__})


def upload_row(record: UploadRecord, num_tokens: int) -> Row:
    row = {**msgspec.structs.asdict(record), "updated": float(record.updated), "num_tokens": num_tokens}
    return with_checksum(tables.uploads, row | _private(record.header) | {"header": b""})


def upload_of(row: Found) -> UploadRecord:
    fields = {name: row[name] for name in UploadRecord.__struct_fields__}
    return UploadRecord(**fields | {"header": row["content"]})


def outgoing_row(key: int, outgoing: OutboxEntry) -> Row:
    return with_checksum(
        tables.outbox, {"key": key, "name": outgoing.name, "padding": PADDING, "content": outgoing.content}
    )


def outgoing_of(row: Found) -> tuple[int, OutboxEntry]:
    """The key and the entry."""
    return row["key"], OutboxEntry(row["name"], row["content"])


def piece_rows(table: Table, key: Row, numbers: "array[int]", start: int = 0) -> Iterator[Row]:
    """Splits the ids of a segment or an upload, or the offsets of its tokens, into pieces from position `start` on."""
    for first in range(0, len(numbers), PIECE_IDS):
        content = pack(numbers[first : first + PIECE_IDS]).tobytes()
        yield with_checksum(table, {**key, "start": start + first, "padding": PADDING, "content": content})


def join_chunks(table: Table, rows: Iterable[Found], num_tokens: int) -> "array[int]":
    """Joins the token ids of pieces, which must be in order. Raises ValueError with the reason if they are invalid."""
    found = _joined(table, rows, "I", "token ids")
    if len(found) != num_tokens:
        raise ValueError(f"expected {num_tokens:,} token ids, found {len(found):,}")
    return found


def joined_starts(table: Table, rows: Iterable[Found]) -> "array[int]":
    """Like `join_chunks`, for token offsets. There may be fewer than tokens, because early versions stored none."""
    return _joined(table, rows, "Q", "places in its text")


def _joined(table: Table, rows: Iterable[Found], kind: Literal["I", "Q"], noun: str) -> "array[int]":
    found = array(kind)
    for row in rows:
        if not checksum_matches(table, row) or row["start"] != len(found):
            raise ValueError(f"its {noun} from {len(found):,} on are damaged")
        found += unpack(kind, row["content"])
    return found
