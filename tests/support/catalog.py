"""Records for tests of the catalog, and their bytes on disk.

`python -m tests.support.catalog PATH` makes the database in tests/fixtures/catalog.
"""

import asyncio
import sys
from array import array
from pathlib import Path
from random import Random
from typing import Any

from coordinator.persistence.catalog.catalog import Catalog
from coordinator.persistence.catalog.records import Change, OutboxEntry, SnapshotRecord, UploadRecord
from longleaf.positions import OWN_ROPE, Rope
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.segment_record import SegmentRecord


def ids(seed: int, count: int) -> "array[int]":
    """Token ids that are nowhere by chance: all four bytes of each matter."""
    random = Random(seed)
    return array("I", [random.randrange(1 << 24, 1 << 32) for _ in range(count)])


def segment(
    number: int, count: int = 20, parent: int | None = None, start: int = 0, rope: Rope = OWN_ROPE
) -> SegmentRecord:
    return SegmentRecord(id=number, parent=parent, start=start, rope=rope, token_ids=ids(number, count))


def context(name: str, last: int, num_tokens: int = 20, **others: Any) -> ContextRecord:
    fields = {"ends": (num_tokens,), "capacity": 1 << 20, "created": 1.5, "updated": 2.5, "last_used": 3.5, **others}
    return ContextRecord(id=name, segment=last, num_tokens=num_tokens, **fields)


def upload(
    name: str = "doc", settled_bytes: int = 100, header: bytes = b"header", updated: float = 4.5
) -> UploadRecord:
    return UploadRecord(context=name, upload_id="u1", header=header, settled_bytes=settled_bytes, updated=updated)


def document(name: str, number: int, count: int = 20) -> Change:
    """A new context of one new segment."""
    return Change(segments=(segment(number, count),), contexts=(context(name, number, count),))


def content_of(folder: Path) -> bytes:
    """All files of a folder, one after the other."""
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())


def remains(folder: Path, token_ids: "array[int]") -> bool:
    """Whether any of some 20 pairs of neighbours among these ids lies in any file of a folder."""
    content = content_of(folder)
    starts = range(0, len(token_ids) - 1, max(1, len(token_ids) // 20))
    return any(token_ids[i : i + 2].tobytes() in content for i in starts)


FIRST = Change(
    segments=(segment(4, 70), segment(7, 30, parent=4, start=50, rope=Rope(4096, True))),
    contexts=(
        context(
            "moby",
            4,
            70,
            ends=(50, 70),
            display_name="Moby-Dick; or, the Whale — 白鯨",
            is_pinned=True,
            num_hits=3,
            upload_id="night 7",
        ),
        context("fork", 7, 80, expires=1e9),
    ),
    snapshots=(SnapshotRecord(segment=4, manifest="segments/4.json", form="float32", num_bytes=12_345),),
    outgoing=(OutboxEntry("segments/4.json", b"{}"), OutboxEntry("segments/1.json", None)),
)
FIRST_UPLOAD = upload(header=bytes(range(256)))
FIRST_EPOCH = 9


async def write_first(path: Path) -> None:
    catalog = await Catalog.open(path)
    await catalog.commit(FIRST)
    await catalog.append_upload(FIRST_UPLOAD, 0, ids(1, 25))
    await catalog.append_upload(FIRST_UPLOAD, 25, ids(2, 5))
    await catalog.note_epoch(FIRST_EPOCH)
    await catalog.close()


if __name__ == "__main__":
    asyncio.run(write_first(Path(sys.argv[1])))
