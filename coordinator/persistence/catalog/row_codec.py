"""Conversion of records to table rows with a checksum, and back."""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from blake3 import blake3
from sqlalchemy import Float, Integer, Table

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
RecordT = TypeVar("RecordT", bound=msgspec.Struct)
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


def _row(table: Table, record: msgspec.Struct, **others: Any) -> Row:
    """The row of a record, whose fields are in the columns of their names, with `others` in addition or instead."""
    values = {**msgspec.structs.asdict(record), **others}
    # SQLite returns numbers in the types of their columns, and the checksum must be that of the returned ones
    types = {column.name: column.type for column in table.columns if column.name != "checksum"}
    return with_checksum(table, {name: _stored(values[name], kind) for name, kind in types.items()})


def _stored(value: Any, kind: object) -> Any:
    if value is None:
        return None
    return float(value) if isinstance(kind, Float) else int(value) if isinstance(kind, Integer) else value


def _record(struct: type[RecordT], row: Found, **others: Any) -> RecordT:
    """The record of a row, with `others` instead of its columns."""
    return msgspec.convert({**{name: row[name] for name in struct.__struct_fields__}, **others}, struct, strict=False)


def segment_row(record: SegmentRecord) -> Row:
    num_tokens = len(record.token_ids)
    return _row(tables.segments, record, num_tokens=num_tokens, **msgspec.structs.asdict(record.rope))


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
    ends, private = " ".join(map(str, record.ends)), _private(record.display_name.encode())
    return _row(tables.contexts, record, ends=ends, display_name="", **private)


def context_of(row: Found) -> ContextRecord:
    return _record(ContextRecord, row, ends=row["ends"].split(), display_name=row["content"].decode())


def _private(content: bytes) -> Row:
    return {"padding": PADDING if content else b"", "content": content}


def snapshot_row(record: SnapshotRecord) -> Row:
    return _row(tables.snapshots, record)


def snapshot_of(row: Found) -> SnapshotRecord:
    return _record(SnapshotRecord, row)


def upload_row(record: UploadRecord, num_tokens: int) -> Row:
    return _row(tables.uploads, record, num_tokens=num_tokens, header=b"", **_private(record.header))


def upload_of(row: Found) -> UploadRecord:
    return _record(UploadRecord, row, header=row["content"])


def outgoing_row(key: int, outgoing: OutboxEntry) -> Row:
    return _row(tables.outbox, outgoing, key=key, padding=PADDING)


def outgoing_of(row: Found) -> tuple[int, OutboxEntry]:
    """The key and the entry."""
    return row["key"], _record(OutboxEntry, row)


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
