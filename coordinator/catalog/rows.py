"""Records to rows and back. What comes back otherwise than it went in is damaged, and never used."""

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from blake3 import blake3

from coordinator.catalog.records import ContextRecord, SegmentRecord
from longleaf.geometry import Rope

IDS_AT_ONCE = 1 << 16
"""In a row of token ids."""
ID_BYTES = 4


class Damaged(Exception):
    """A row, or one that it needs, is not as it was written."""


class SegmentContent(msgspec.Struct, frozen=True):
    """What the row of a segment tells beside its id and parent."""

    start: int
    num_tokens: int
    scaled_for: int
    is_double: bool


def checksum(*parts: bytes) -> bytes:
    """The blake3 of parts of a row."""
    return blake3(msgspec.msgpack.encode(parts)).digest()


def segment_row(record: SegmentRecord) -> dict[str, Any]:
    rope = record.rope
    content = SegmentContent(record.start, len(record.token_ids), rope.scaled_for, rope.is_double)
    encoded = msgspec.json.encode(content)
    key = f"{record.id} {record.parent}".encode()
    return {
        "id": record.id,
        "parent": record.parent,
        "content": encoded.decode(),
        "checksum": checksum(key, encoded),
    }


def token_rows(record: SegmentRecord) -> Iterator[dict[str, Any]]:
    """Rows of at most IDS_AT_ONCE ids."""
    for number, first in enumerate(range(0, len(record.token_ids), IDS_AT_ONCE)):
        ids = _to_bytes(record.token_ids[first : first + IDS_AT_ONCE])
        sum_ = checksum(f"{record.id} {number}".encode(), ids)
        yield {"segment": record.id, "number": number, "ids": ids, "checksum": sum_}


def context_row(record: ContextRecord) -> dict[str, Any]:
    encoded = msgspec.json.encode(record)
    return {
        "id": record.id,
        "segment": record.segment,
        "content": encoded.decode(),
        "checksum": checksum(record.id.encode(), encoded),
    }


def segment_of(row: Mapping[Any, Any], tokens: Iterable[Mapping[Any, Any]]) -> SegmentRecord:
    """The segment that a row and those of its ids tell of. Raises Damaged."""
    number = row["id"]
    encoded = _encoded(row, f"{number} {row['parent']}".encode(), f"what is kept of segment {number}")
    content = msgspec.json.decode(encoded, type=SegmentContent)
    ids = array("I")
    for expected, found in enumerate(tokens):
        is_next = found["number"] == expected
        if not is_next or found["checksum"] != checksum(f"{number} {expected}".encode(), found["ids"]):
            raise Damaged(f"its token ids from {expected * IDS_AT_ONCE:,} of segment {number} on are not as written")
        ids += _from_bytes(found["ids"])
    if len(ids) != content.num_tokens:
        raise Damaged(f"{len(ids):,} of the {content.num_tokens:,} token ids of segment {number} are there")
    rope = Rope(scaled_for=content.scaled_for, is_double=content.is_double)
    return SegmentRecord(id=number, parent=row["parent"], start=content.start, rope=rope, token_ids=ids)


def context_of(row: Mapping[Any, Any]) -> ContextRecord:
    """The context that a row tells of. Raises Damaged."""
    record = msgspec.json.decode(_encoded(row, _bytes(row["id"]), "what is kept of it"), type=ContextRecord)
    if (record.id, record.segment) != (row["id"], row["segment"]):
        raise Damaged("its segment is another one than was written")
    return record


def _encoded(row: Mapping[Any, Any], key: bytes, what: str) -> bytes:
    content = _bytes(row["content"])
    if row["checksum"] != checksum(key, content):
        raise Damaged(f"{what} is not as written")
    return content


def _bytes(found: str | bytes) -> bytes:
    """SQLite gives whatever lies in a column."""
    return found.encode(errors="surrogateescape") if isinstance(found, str) else bytes(found)


def _to_bytes(ids: "array[int]") -> bytes:
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


def _from_bytes(content: bytes) -> "array[int]":
    ids = array("I")
    ids.frombytes(content)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
