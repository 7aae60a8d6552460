"""Any puts, deletes and sweeps, in memory, a folder or a driver of fsspec: the objects are those of a table."""

import os
import tempfile
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from longleaf.errors import AlreadyExists, NotFound
from longleaf.storage.gc import sweep
from longleaf.storage.names import Attempt, NotePlace
from longleaf.storage.store import Store
from tests.support.fakes.storage import MemoryFiles

SERVICES = ("a", "a-b", "b")
GRACE = 10.0
NAMES = st.one_of(
    st.builds(
        lambda service, segment, attempt, number: Attempt(service, segment, attempt).piece(number),
        *(st.sampled_from(SERVICES), st.sampled_from(["s-1", "s-2"]), st.sampled_from(["1f", "2f"])),
        st.integers(0, 1),
    ),
    st.builds(
        lambda service, segment: Attempt(service, segment, "1f").manifest,
        *(st.sampled_from(SERVICES), st.sampled_from(["s-1", "s-2"])),
    ),
    st.builds(
        lambda service, context, number: NotePlace(service, context, number).name,
        *(st.sampled_from(SERVICES), st.sampled_from(["moby", "moby.dick"]), st.integers(0, 3)),
    ),
    st.sampled_from(["services/a/others", "elsewhere/a", "services/a/segments/s-1/1f/manifest.01.part"]),
)


class StoreMachine(RuleBasedStateMachine):
    """A store with a clock that returns `now`, beside a table of content and age by name."""

    names = Bundle("names")

    @initialize()
    def begin(self) -> None:
        self.now = 1000.0
        self.table: dict[str, tuple[bytes, float]] = {}
        self.store = self.make_store()

    def make_store(self) -> Store:
        return Store(MemoryFiles(lambda: self.now), "fake://x")

    def wrote(self, name: str) -> None:
        """The object was put at `now`."""

    @rule(target=names, name=NAMES)
    def name(self, name):
        return name

    @rule(name=names, content=st.lists(st.binary(max_size=9), max_size=3), is_new=st.booleans())
    def put(self, name, content, is_new):
        try:
            assert self.store.put(name, content, is_new=is_new).num_bytes == sum(map(len, content))
        except AlreadyExists:
            assert is_new and name in self.table
            return
        assert not (is_new and name in self.table)
        self.wrote(name)
        self.table[name] = b"".join(content), self.now

    @rule(names=st.lists(names, max_size=3))
    def delete(self, names):
        self.store.delete(names)
        for name in names:
            self.table.pop(name, None)

    @rule(name=names)
    def get(self, name):
        assert self.store.exists(name) == (name in self.table)
        if name in self.table:
            assert self.store.get(name) == self.table[name][0]
            assert self.store.size(name) == len(self.table[name][0])
        else:
            with pytest.raises(NotFound):
                self.store.get(name)

    @rule(seconds=st.sampled_from([1.0, GRACE, 3 * GRACE]))
    def wait(self, seconds):
        self.now += seconds

    @rule(service=st.sampled_from(SERVICES), live=st.lists(names, max_size=4))
    def sweep(self, service, live):
        expected = {name for name in self.table if not self.is_swept(name, service, set(live))}
        swept = sweep(self.store, service, self.now, GRACE, set(live))
        assert swept.num_objects == len(self.table) - len(expected)
        assert swept.num_bytes == sum(len(self.table[name][0]) for name in self.table.keys() - expected)
        self.table = {name: self.table[name] for name in expected}

    def is_swept(self, name, service, live):
        parts = name.split("/")
        if parts[:2] != ["services", service]:
            return False
        if parts[2] == "segments":
            return name not in live and self.is_old(name)
        # the next note of the same context, if there is one
        later = sorted(other for other in self.table if other.split("/")[:4] == parts[:4] and other > name)
        return parts[2] == "notes" and bool(later) and self.is_old(later[0])

    def is_old(self, name):
        return self.table[name][1] < self.now - GRACE

    @invariant()
    def audit(self):
        for folder in ("", "services/a", "services/a-b/segments", "services/none"):
            found = {entry.name: (entry.num_bytes, entry.modified) for entry in self.store.list(folder)}
            assert found == {
                name: (len(content), at)
                for name, (content, at) in self.table.items()
                if not folder or name.startswith(f"{folder}/")
            }


class FolderMachine(StoreMachine):
    """In a folder, whose files are dated back."""

    def make_store(self):
        self.folder = tempfile.TemporaryDirectory()
        return Store.open(self.folder.name)

    def wrote(self, name):
        os.utime(Path(self.folder.name) / name, (self.now, self.now))

    def teardown(self):
        folders = [path for path in Path(self.folder.name).rglob("*") if path.is_dir()]
        assert all(any(folder.iterdir()) for folder in folders)
        self.folder.cleanup()


class FsspecMachine(StoreMachine):
    """In the memory of fsspec, whose objects are dated back."""

    def make_store(self):
        self.root = f"memory://{uuid.uuid4().hex}/below"
        return Store.open(self.root)

    def wrote(self, name):
        path = MemoryFileSystem._strip_protocol(f"{self.root}/{name}")
        MemoryFileSystem.store[path].created = datetime.fromtimestamp(self.now, UTC)

    def teardown(self):
        self.store.delete(self.table)
        assert not [name for name in MemoryFileSystem.store if name.startswith(self.root.removeprefix("memory:/"))]


FEW = settings(max_examples=12, stateful_step_count=30)
MANY = settings(max_examples=100, stateful_step_count=30)


class TestStoreMachine(StoreMachine.TestCase):
    settings = FEW


class TestFolderMachine(FolderMachine.TestCase):
    settings = FEW


@pytest.mark.extended
class TestStoreMachineExtended(StoreMachine.TestCase):
    settings = MANY


@pytest.mark.extended
class TestFolderMachineExtended(FolderMachine.TestCase):
    settings = MANY


TestFsspecMachine = FsspecMachine.TestCase
TestFsspecMachine.settings = MANY
TestFsspecMachine = pytest.mark.extended(TestFsspecMachine)
