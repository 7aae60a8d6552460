"""A database on a disk: order, deletions, processes that are killed, and files of earlier versions."""

import asyncio
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from array import array
from pathlib import Path
from random import Random

import pytest

from coordinator.persistence.catalog.catalog import DATABASE, Catalog, read_only_catalog
from coordinator.persistence.catalog.records import Change, OutboxEntry, SnapshotRecord
from coordinator.persistence.catalog.row_codec import PIECE_IDS
from coordinator.persistence.catalog.schema import revision_of
from coordinator.persistence.catalog.tables import HEAD, metadata
from longleaf.errors import DataLoss, Unavailable
from tests.support.catalog import (
    FIRST,
    FIRST_EPOCH,
    FIRST_UPLOAD,
    content_of,
    context,
    document,
    ids,
    remains,
    segment,
    upload,
)

FIXTURE = Path(__file__).parents[3] / "fixtures" / "catalog" / "first.db"


async def test_commits_of_several_tasks_follow_call_order(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    changes = [document("a", 2 * number) for number in range(10)]
    others = [document("b", 2 * number + 1) for number in range(10)]
    pairs = zip(changes, others, strict=True)
    committed = await asyncio.gather(*(catalog.commit(change) for pair in pairs for change in pair))
    # each one replaces the previous one, whose segment is dropped
    assert [each.segments for each in committed] == [(), (), *((number,) for number in range(18))]
    retained = await catalog.load()
    assert [each.segment for each in retained.contexts] == [18, 19]
    await catalog.close()


async def test_event_loop_stays_responsive_and_cancelled_commits_complete(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    call = asyncio.create_task(catalog.commit(document("a", 0, 200_000)))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [each.id for each in (await catalog.load()).contexts] == ["a"]
    await catalog.close()


async def test_close_finishes_pending_commits_and_refuses_new_ones(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    calls = [asyncio.create_task(catalog.commit(document(f"c{number}", number))) for number in range(5)]
    await asyncio.sleep(0)
    await asyncio.gather(catalog.close(), catalog.close())
    await asyncio.gather(*calls)
    with pytest.raises(Unavailable, match="stopping"):
        await catalog.load()
    assert len(read_only_catalog(tmp_path).contexts) == 5
    assert not (tmp_path / f"{DATABASE}-wal").exists() or not (tmp_path / f"{DATABASE}-wal").stat().st_size


async def test_change_without_a_base_leaves_nothing(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    await catalog.commit(document("a", 0))
    before = await catalog.load()
    wrong = [
        Change(segments=(segment(1),), contexts=(context("b", 9),)),
        Change(segments=(segment(1, parent=9, start=5),), contexts=(context("b", 1),)),
        Change(segments=(segment(0),), contexts=(context("b", 0),)),
    ]
    for change in wrong:
        with pytest.raises(DataLoss, match="its contents are inconsistent"):
            await catalog.commit(change)
        assert await catalog.load() == before
    await catalog.commit(document("b", 1))
    await catalog.close()


async def test_dropped_segments_are_queued_for_deletion_on_storage(tmp_path: Path) -> None:
    """Includes the snapshot of a segment that was deleted while it was saved."""
    catalog = await Catalog.open(tmp_path / DATABASE)
    await catalog.commit(document("a", 0))
    await catalog.commit(Change(snapshots=(SnapshotRecord(segment=0, manifest="m/0", form="f", num_bytes=1),)))
    committed = await catalog.commit(Change(dropped_contexts=("a",)))
    assert (committed.segments, committed.manifests) == ((0,), ("m/0",))
    committed = await catalog.commit(
        Change(snapshots=(SnapshotRecord(segment=0, manifest="m/1", form="f", num_bytes=1),))
    )
    assert committed.manifests == ("m/1",)
    assert [each for _, each in await catalog.outgoing(9)] == [OutboxEntry("m/0", None), OutboxEntry("m/1", None)]
    retained = await catalog.load()
    assert (retained.snapshots, retained.next_outgoing) == ((), 2)
    await catalog.close()


async def test_segment_ids_are_never_reused(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    await catalog.commit(document("a", 41))
    await catalog.commit(Change(dropped_contexts=("a",)))
    await catalog.commit(document("b", 7))  # started before, finished later
    await catalog.close()
    catalog = await Catalog.open(tmp_path / DATABASE)
    assert (await catalog.load()).next_segment == 42
    await catalog.close()


async def test_deleted_ids_are_erased_from_the_disk(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    counts = dict(enumerate([3, 190, 900, 1100, 5000, PIECE_IDS + 9] * 2))
    for number, count in counts.items():
        await catalog.commit(document(f"c{number}", number, count))
    assert all(remains(tmp_path, ids(number, 3)) for number in counts)
    order = sorted(counts, key=lambda number: number * 17 % len(counts))
    for deleted, number in enumerate(order, 1):
        await catalog.commit(Change(dropped_contexts=(f"c{number}",)))
        assert [gone for gone in order[:deleted] if remains(tmp_path, ids(gone, counts[gone]))] == []
    await catalog.close()


async def test_small_documents_leave_nothing_when_trees_are_balanced(tmp_path: Path) -> None:
    """Without padding, copies of some remain in the file."""
    catalog, random = await Catalog.open(tmp_path / DATABASE), Random(0)
    alive: dict[int, int] = {}
    gone: dict[int, int] = {}
    for number in range(200):
        alive[number] = random.randrange(2, random.choice([40, 400, 2500]))
        await catalog.commit(document(f"c{number}", number, alive[number]))
        if number % 5:
            deleted = random.choice(list(alive))
            gone[deleted] = alive.pop(deleted)
            await catalog.commit(Change(dropped_contexts=(f"c{deleted}",)))
    assert [number for number, count in gone.items() if remains(tmp_path, ids(number, count))] == []
    await catalog.close()


SECRET = re.compile(rb"secret [0-9]+ ")


async def test_client_texts_leave_nothing_when_trees_are_balanced(tmp_path: Path) -> None:
    """System messages of uploads, and display names of contexts: whole pages of a tree move at once."""
    catalog, random = await Catalog.open(tmp_path / DATABASE), Random(0)

    def text(number: int) -> str:
        return f"secret {number} " * random.randrange(1, 40)

    await catalog.commit(Change(segments=(segment(0),), contexts=(context("first", 0),)))
    alive = list[int]()
    for number in range(150):
        changed = context(f"c{number % 40}", 0, display_name=text(number))
        await catalog.commit(Change(contexts=(changed,)))
        await catalog.append_upload(upload(f"d{number}", header=text(1000 + number).encode()), 0, ids(number, 3))
        alive.append(number)
        if number % 4:
            gone = alive.pop(random.randrange(len(alive)))
            await catalog.drop_upload((f"d{gone}", "u1"))
        if number % 7 == 0:
            await catalog.commit(Change(dropped_contexts=(f"c{random.randrange(40)}",)))
    await catalog.commit(Change(dropped_contexts=("c1",)))
    retained = await catalog.load()
    known = [*(each.display_name.encode() for each in retained.contexts), *(each.header for each in retained.uploads)]
    content = content_of(tmp_path)
    assert set(SECRET.findall(content)) == set(SECRET.findall(b"".join(known)))
    await catalog.close()


async def test_ids_in_outgoing_entries_are_deleted_with_the_context(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    content = ids(0, 500).tobytes()
    await catalog.commit(Change(outgoing=(OutboxEntry("m", content),)))
    assert remains(tmp_path, ids(0, 500))
    (first,) = await catalog.outgoing(9)
    await catalog.commit(Change(outgoing=(OutboxEntry("m", None),)))
    assert not remains(tmp_path, ids(0, 500))
    await catalog.done([first[0]])  # it was being sent when it was replaced
    assert [each for _, each in await catalog.outgoing(9)] == [OutboxEntry("m", None)]
    await catalog.close()


async def test_data_held_by_another_reader_is_erased_with_the_next_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE, busy_seconds=0.05)
    await catalog.commit(document("a", 0))
    reader = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM contexts").fetchone() == (1,)
    await catalog.commit(Change(dropped_contexts=("a",)))
    assert remains(tmp_path, ids(0, 20)) and "another process is reading it" in caplog.text
    reader.close()
    await catalog.commit(Change())
    assert not remains(tmp_path, ids(0, 20))
    await catalog.close()


async def test_upload_becomes_a_context_in_one_commit(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    await catalog.append_upload(upload(), 0, ids(0, PIECE_IDS + 5))
    await catalog.append_upload(upload(settled_bytes=200), PIECE_IDS + 5, ids(1, 5))
    assert await catalog.upload_ids(("doc", "u1")) == ids(0, PIECE_IDS + 5) + ids(1, 5)
    assert (await catalog.load()).uploads == (upload(settled_bytes=200),)
    await catalog.commit(Change(dropped_uploads=(("doc", "u1"),)))
    assert await catalog.upload_ids(("doc", "u1")) == array("I")
    await catalog.drop_upload(("doc", "u1"))
    await catalog.close()


async def test_upload_part_at_the_wrong_offset_is_refused(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    await catalog.append_upload(upload(), 0, ids(0, 20))
    with pytest.raises(DataLoss, match="it has 20 token ids, and the next ones start at 25"):
        await catalog.append_upload(upload(settled_bytes=200), 25, ids(1, 5))
    assert await catalog.upload_ids(("doc", "u1")) == ids(0, 20)
    assert (await catalog.load()).uploads == (upload(),)
    await catalog.close()


async def test_uploads_into_a_context_are_deleted_with_it(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    await catalog.commit(document("doc", 0))
    await catalog.append_upload(upload(), 0, ids(7, 20))
    await catalog.append_upload(upload("other"), 0, ids(8, 20))
    await catalog.commit(Change(dropped_contexts=("doc",)))
    assert (await catalog.load()).uploads == (upload("other"),)
    assert not remains(tmp_path, ids(7, 20))
    await catalog.close()


async def test_allocated_ids_are_never_allocated_again(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / DATABASE)
    for number in (70, 5):
        await catalog.commit(Change(next_segment=number))
    await catalog.close()
    catalog = await Catalog.open(tmp_path / DATABASE)
    assert (await catalog.load()).next_segment == 70
    await catalog.close()


CHILD = """
import asyncio, sys
from pathlib import Path
from coordinator.persistence.catalog.catalog import Catalog
from coordinator.persistence.catalog.records import Change
from tests.support.catalog import document

async def main():
    catalog = await Catalog.open(Path(sys.argv[1]))
    number = (await catalog.load()).next_segment
    while True:
        change = document(f"c{number}", number, 3000)
        await catalog.commit(change)
        print(number, flush=True)
        number += 1

asyncio.run(main())
"""


def test_acknowledged_changes_survive_kill_9(tmp_path: Path) -> None:
    path, printed = tmp_path / DATABASE, list[int]()
    for process in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        printed += [int(child.stdout.readline()) for _ in range(5 + 3 * process)]
        os.kill(child.pid, signal.SIGKILL)
        printed += [int(line) for line in child.stdout.read().split("\n") if line]
        child.wait()
        child.stdout.close()
        retained = read_only_catalog(tmp_path)
        assert retained.damaged == {} and set(printed) <= {each.id for each in retained.segments}
        assert len(retained.segments) <= len(printed) + process + 1
        for each in retained.contexts:
            assert retained.path(each)[0].token_ids == ids(each.segment, 3000)


async def test_file_of_the_first_schema_is_opened(tmp_path: Path) -> None:
    shutil.copy(FIXTURE, tmp_path / DATABASE)
    catalog = await Catalog.open(tmp_path / DATABASE)
    retained = await catalog.load()
    assert (retained.segments, retained.contexts, retained.snapshots) == (
        FIRST.segments,
        tuple(sorted(FIRST.contexts, key=lambda each: each.id)),
        FIRST.snapshots,
    )
    assert (retained.uploads, retained.epoch, retained.next_segment) == ((FIRST_UPLOAD,), FIRST_EPOCH, 8)
    assert len(retained.service_id) == 32 and not (
        retained.damaged or retained.damaged_contexts or retained.other_damage
    )
    assert await catalog.upload_ids(FIRST_UPLOAD.key) == ids(1, 25) + ids(2, 5)
    assert [each for _, each in await catalog.outgoing(9)] == list(FIRST.outgoing)
    await catalog.commit(document("new", retained.next_segment))
    await catalog.close()


async def test_migrated_tables_equal_the_declared_ones(tmp_path: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from sqlalchemy import create_engine

    await (await Catalog.open(tmp_path / DATABASE)).close()
    with create_engine(f"sqlite:///{tmp_path / DATABASE}").connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert revision_of(connection) == HEAD
        declared = dict(connection.exec_driver_sql("SELECT name, sql FROM sqlite_master").all())
    with sqlite3.connect(":memory:") as fresh:
        engine = create_engine("sqlite://", creator=lambda: fresh)
        metadata.create_all(engine)
        made = dict(fresh.execute("SELECT name, sql FROM sqlite_master"))
    assert {name: _words(sql) for name, sql in made.items()} == {
        name: _words(sql) for name, sql in declared.items() if "alembic_version" not in name
    }


def _words(sql: str | None) -> list[str]:
    return sorted((sql or "").replace(",", " ").split())
