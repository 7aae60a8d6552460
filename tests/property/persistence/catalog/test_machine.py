"""Any changes, with closing, opening or killing at any point: the stored state equals that of a dictionary."""

import asyncio
import shutil
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from coordinator.persistence.catalog.catalog import DATABASE, Catalog, read_only_catalog
from coordinator.persistence.catalog.records import (
    CatalogContents,
    Change,
    CommitResult,
    OutboxEntry,
    SnapshotRecord,
    UploadRecord,
)
from longleaf.document_text import DocumentText, TextFile, count_starts
from longleaf.errors import DataLoss, NotFound
from longleaf.little_endian import pack
from longleaf.positions import Rope
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.segment_record import SegmentRecord
from tests.support.catalog import context, ids, remains
from tests.support.fakes.catalog import FakeCatalog

COUNTS = st.integers(1, 40) | st.integers(900, 3000)
"""Ids within a page of the database, and on pages of their own."""
NAMES = st.sampled_from("a b c ü".split())
TIMES = st.floats(0, 1e10) | st.integers(0, 1 << 33)
OBJECTS = st.sampled_from(["x.json", "y.json"])


class CatalogMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.place = TemporaryDirectory()
        self.folder = Path(self.place.name, "catalog")
        self.folder.mkdir()
        self.catalog = self.run(Catalog.open(self.folder / DATABASE))
        self.fake = FakeCatalog(self.run(self.catalog.load()))
        self.next_segment = 0
        self.seen_uploads: dict[tuple[str, str], array[int]] = {}

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.run(self.catalog.close())
            self.runner.close()
            self.place.cleanup()

    def run(self, call):
        return self.runner.run(call)

    @property
    def contents(self) -> CatalogContents:
        return self.fake.contents

    def commit(self, **fields: object) -> CommitResult:
        change = Change(**fields)
        before = {each.id: each for each in self.contents.segments}
        expected = self.run(self.fake.commit(change))
        assert self.run(self.catalog.commit(change)) == expected
        for number in expected.segments:
            gone = before.get(number)
            assert gone is None or not remains(self.folder, gone.token_ids)
        return expected

    def new_segment(self, count: int, before: ContextRecord | None, rope: Rope) -> SegmentRecord:
        self.next_segment += 1
        parent, start = (before.segment, before.num_tokens) if before else (None, 0)
        token_ids = ids(self.next_segment, count)
        starts, files = pack(array("Q", range(count_starts(count)))).tobytes(), (TextFile("a.txt", 0),)
        text = DocumentText(num_lead=0, starts=starts, num_bytes=count, files=files) if count % 2 else None
        reported = {"id": self.next_segment, "parent": parent, "start": start}
        return SegmentRecord(**reported, rope=rope, token_ids=token_ids, text=text)

    @rule(name=NAMES, count=COUNTS, rope=st.builds(Rope, st.integers(0, 9), st.booleans()), data=st.data())
    def ingest(self, name: str, count: int, rope: Rope, data: st.DataObject) -> None:
        """A context that is new, replaced, or appended to."""
        old = next((each for each in self.contents.contexts if each.id == name and data.draw(st.booleans())), None)
        new = self.new_segment(count, old, rope)
        record = replace(old, segment=new.id, num_tokens=new.end) if old else context(name, new.id, new.end)
        snapshots = (SnapshotRecord(segment=new.id, manifest=f"m{new.id}", form="f", num_bytes=1),)
        self.commit(segments=(new,), contexts=(record,), snapshots=snapshots if data.draw(st.booleans()) else ())

    @precondition(lambda self: self.contents.contexts)
    @rule(name=NAMES, data=st.data())
    def fork(self, name: str, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.contents.contexts))
        end = data.draw(st.integers(1, source.num_tokens))
        last = next(each for each in reversed(self.contents.path(source)) if each.start < end)
        self.commit(contexts=(replace(source, id=name, segment=last.id, num_tokens=end),))

    @precondition(lambda self: self.contents.contexts)
    @rule(text=st.text(st.characters(exclude_categories=["Cs"])), is_pinned=st.booleans(), time=TIMES, data=st.data())
    def update(self, text: str, is_pinned: bool, time: float, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.contents.contexts))
        ends = tuple(data.draw(st.lists(st.integers(0, 1 << 40), max_size=5)))
        expires = data.draw(st.none() | TIMES)
        times = {"updated": time, "expires": expires, "last_used": time}
        self.commit(contexts=(replace(old, display_name=text, is_pinned=is_pinned, ends=ends, **times),))

    @rule(names=st.lists(NAMES, max_size=3))
    def drop(self, names: list[str]) -> None:
        self.commit(dropped_contexts=tuple(names))

    @precondition(lambda self: self.contents.segments)
    @rule(is_put=st.booleans(), data=st.data())
    def snapshot(self, is_put: bool, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.contents.segments)).id
        manifest = data.draw(st.sampled_from(["m", f"m{number}"]))
        put = SnapshotRecord(segment=number, manifest=manifest, form="g", num_bytes=1 << 40)
        self.commit(snapshots=(put,) if is_put else (), dropped_snapshots=(number,))

    @rule(name=NAMES, count=st.integers(0, 50), num_settled=st.integers(0, 1 << 40), time=TIMES, header=st.binary())
    def upload(self, name: str, count: int, num_settled: int, time: float, header: bytes) -> None:
        record = UploadRecord(context=name, upload_id="u", header=header, settled_bytes=num_settled, updated=time)
        self.next_segment += 1
        new_ids = ids(self.next_segment, count)
        self.seen_uploads[record.key] = new_ids
        num_retained = len(self.run(self.catalog.upload_ids(record.key)))
        is_there = any(each.key == record.key for each in self.fake.contents.uploads)
        refused = (DataLoss, f"it has {num_retained} token ids") if is_there else (NotFound, "does not exist")
        for catalog in (self.fake, self.catalog):
            with pytest.raises(refused[0], match=refused[1]):
                self.run(catalog.append_upload(record, num_retained + 1, new_ids))
            starts = array("Q", range(count_starts(num_retained), count_starts(num_retained + count)))
            self.run(catalog.append_upload(record, num_retained, new_ids, starts))

    @rule(name=NAMES)
    def end_upload(self, name: str) -> None:
        self.commit(dropped_uploads=((name, "u"),))
        assert not remains(self.folder, self.seen_uploads.get((name, "u"), array("I")))

    @rule(name=OBJECTS, content=st.none() | st.binary())
    def send(self, name: str, content: bytes | None) -> None:
        self.commit(outgoing=(OutboxEntry(name, content),))

    @rule(limit=st.integers(0, 3))
    def sent(self, limit: int) -> None:
        keys = [key for key, _ in self.run(self.catalog.outgoing(limit))]
        for catalog in (self.fake, self.catalog):
            self.run(catalog.done(keys))

    @rule(epoch=st.integers(0, 100))
    def begin_epoch(self, epoch: int) -> None:
        for catalog in (self.fake, self.catalog):
            self.run(catalog.note_epoch(epoch))

    @rule()
    def reopen(self) -> None:
        self.run(self.catalog.close())
        self.catalog = self.run(Catalog.open(self.folder / DATABASE))

    @rule()
    def restart_from_a_copy(self) -> None:
        """As after kill -9: nothing was closed."""
        copy = self.folder.with_name("copy")
        copy.mkdir()
        for name in (DATABASE, f"{DATABASE}-wal"):
            shutil.copy(self.folder / name, copy)
        self.run(self.catalog.close())
        shutil.rmtree(self.folder)
        copy.rename(self.folder)
        self.catalog = self.run(Catalog.open(self.folder / DATABASE))

    @rule()
    def read_beside(self) -> None:
        assert read_only_catalog(self.folder) == self.contents

    @invariant()
    def holds_the_same(self) -> None:
        if not hasattr(self, "catalog"):
            return
        retained = self.run(self.catalog.load())
        assert retained == self.contents
        for record in retained.uploads:
            assert self.run(self.catalog.upload_ids(record.key)) == self.run(self.fake.upload_ids(record.key))
            starts = self.run(self.catalog.upload_starts(record.key))
            assert starts == self.run(self.fake.upload_starts(record.key)) == array("Q", range(len(starts)))
        assert self.run(self.catalog.outgoing(9)) == self.run(self.fake.outgoing(9))
        for each in retained.contexts:
            retained.path(each)


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=12, stateful_step_count=20)


@pytest.mark.extended
class TestCatalogMachineExtended(CatalogMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=20)
