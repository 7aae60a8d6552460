"""A lost catalog is rebuilt from the records that its service wrote to a storage folder."""

import asyncio
import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.engine.engine import Engine
from coordinator.persistence.catalog.catalog import Catalog, read_only_catalog
from coordinator.persistence.catalog.data_folder import DataFolder
from coordinator.persistence.catalog.identity import Identity, read_identity
from coordinator.persistence.catalog.rebuild_command import run
from coordinator.persistence.catalog.records import CatalogContents, Change, OutboxEntry, SnapshotRecord
from longleaf.config import EngineConfig, embedded_model
from longleaf.errors import CatalogError, InvalidArgument
from longleaf.positions import Rope
from longleaf.storage.context_note import ContextNote
from longleaf.storage.manifest import SegmentManifest
from longleaf.storage.store import Store
from longleaf.types import Rebuild
from tests.support import forked
from tests.support.catalog import context, document, segment
from tests.support.command_line import CLI
from tests.support.fakes.catalog import FakeCatalog
from tests.support.fakes.ranks import FakeRanks
from tests.support.lasting import MemoryLasting
from tests.support.running import running
from tests.support.stored_contexts import deletion, manifest_of, note_of, put_manifest, put_note

MODEL = embedded_model()
ROPE = Rope(4096, True)
ROOT, MORE = segment(0, 300, rope=ROPE), segment(1, 40, parent=0, start=300, rope=ROPE)
LEAF, GONE = segment(2, 20, parent=0, start=250, rope=ROPE), segment(3, 10)


def used(record):
    return replace(record, last_used=record.updated)


BOOK = used(context("book", 0, 300, display_name="a book", is_pinned=True))
LONGER = used(context("book", 1, 340, ends=(300, 340), display_name="a book", is_pinned=True, updated=9.5))
TWIG = used(context("twig", 0, 250, expires=1e10))
GROWN = used(context("twig", 2, 270, ends=(250, 270), updated=8.5))
POEM = used(context("poem", 3, 10))
STEPS: Sequence[tuple[Change, ContextNote]] = (
    (Change(segments=(ROOT,), contexts=(BOOK,)), note_of(BOOK, 0)),
    (Change(contexts=(TWIG,)), note_of(TWIG, 1)),
    (Change(segments=(MORE,), contexts=(LONGER,)), note_of(LONGER, 2)),
    (Change(segments=(LEAF,), contexts=(GROWN,)), note_of(GROWN, 3)),
    (Change(segments=(GONE,), contexts=(POEM,)), note_of(POEM, 4)),
    (Change(dropped_contexts=("poem",)), deletion("poem", 5)),
)
"""The operations of a service and its records: documents, an append, a fork that continues separately, a deletion."""

EPOCH = 7


@pytest.fixture(name="identity", scope="module")
def identity_of() -> Identity:
    return read_identity(MODEL, "auto")


class Service:
    """Writes contexts to a data folder and to storage, like a service that has ended."""

    def __init__(self, tmp_path: Path, identity: Identity) -> None:
        self.url, self.data_dir = str(tmp_path / "storage"), tmp_path / "data"
        self.folder = self.data_dir / identity.digest[:32]
        self.store, self.identity = Store.open(self.url), identity
        self.contents = asyncio.run(self._live())

    async def _live(self) -> CatalogContents:
        folder = DataFolder.open(self.data_dir, self.identity.digest, str(MODEL), self.identity.facts)
        catalog = await Catalog.open(folder.database)
        self.service_id = (await catalog.load()).service_id
        for change, note in STEPS:
            manifests = [self.manifest(each) for each in change.segments]
            names = [put_manifest(self.store, manifest) for manifest in manifests]
            snapshots = [
                SnapshotRecord(segment=number.id, manifest=name, form="float32", num_bytes=80)
                for number, name in zip(change.segments, names, strict=True)
            ]
            await catalog.commit(replace(change, snapshots=tuple(snapshots)))
            put_note(self.store, self._own(note))
        await catalog.note_epoch(EPOCH)
        retained = await catalog.load()
        await catalog.close()
        folder.close()
        return retained

    def manifest(self, record, attempt: str = "1") -> SegmentManifest:
        return manifest_of(record, self.service_id, self.identity.digest, attempt)

    def _own(self, note: ContextNote) -> ContextNote:
        return note._replace(place=note.place._replace(service=self.service_id))

    def rebuild_request(self, **others) -> Rebuild:
        return Rebuild(url=self.url, data_dir=str(self.data_dir), model=str(MODEL), **others)

    def lose(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()

    async def load(self) -> CatalogContents:
        catalog = await Catalog.open(self.folder / "catalog.db")
        retained = await catalog.load()
        await catalog.close()
        return retained


@pytest.fixture(name="service")
def service_of(tmp_path: Path, identity: Identity) -> Service:
    return Service(tmp_path, identity)


def same(contents: CatalogContents) -> CatalogContents:
    """Without the last epoch and the outgoing segments, which storage does not record."""
    return replace(contents, epoch=0, next_outgoing=0)


def test_lost_catalog_is_rebuilt_completely(service: Service) -> None:
    service.lose()
    report = run(service.rebuild_request())
    assert [(each.name, each.tokens) for each in report.contexts] == [("book", 340), ("twig", 270)]
    assert (report.skipped, report.other_manifests, report.moved) == ((), 0, ())
    assert (report.folder, report.service) == (str(service.folder), service.service_id)
    found = asyncio.run(service.load())
    assert same(found) == same(service.contents)
    assert found.next_segment == 4
    assert {path.name for path in service.folder.iterdir()} <= {"catalog.db", "lock", "holder.json", "model.json"}
    assert (service.folder / "catalog.db").stat().st_mode & 0o777 == 0o600


async def test_engine_starts_from_a_rebuilt_catalog(service: Service) -> None:
    service.lose()
    await asyncio.to_thread(run, service.rebuild_request())
    persistence = MemoryLasting()
    persistence.catalog = FakeCatalog(await service.load())
    config = EngineConfig(model="none", world_size=2, block_size=4)
    async with running(
        Engine(FakeRanks(2, 400), config, 3000, durability=persistence, wall_clock=lambda: 12.0)
    ) as found:
        listed = {each.id: (each.tokens, each.state, each.display_name) for each in found.engine.list_contexts()}
        assert listed == {"book": (340, "evicted", "a book"), "twig": (270, "evicted", "")}
        found.engine.audit()


def test_numbering_continues_after_a_rebuild(service: Service) -> None:
    service.lose()
    run(service.rebuild_request())

    async def goes_on() -> None:
        catalog = await Catalog.open(service.folder / "catalog.db")
        await catalog.commit(replace(document("new", 4), outgoing=(OutboxEntry("a", b"b"),)))
        [(key, _)] = await catalog.outgoing(10)
        assert key == 6, "greater than that of any note"
        assert [each.id for each in (await catalog.load()).contexts] == ["book", "new", "twig"]
        await catalog.close()

    asyncio.run(goes_on())


@pytest.mark.parametrize("harm", ["cut", "bytes", "only wal"])
def test_damaged_catalog_is_moved_aside_with_its_files(service: Service, harm: str) -> None:
    path = service.folder / "catalog.db"
    content = path.read_bytes()
    (service.folder / "catalog.db-wal").write_bytes(b"a log")
    if harm == "only wal":
        path.unlink()
    else:
        path.write_bytes(content[:100] if harm == "cut" else b"?" * len(content))
    (service.folder / "journal").mkdir()
    (service.folder / "journal" / "x.journal").write_bytes(b"held")
    report = run(service.rebuild_request())
    names = [Path(name).name for name in report.moved]
    assert [name.partition(".damaged-")[0] for name in names] == ["catalog.db"] * (len(names) - 1) + ["journal"]
    assert any(name.endswith("Z-wal") for name in names)
    if harm != "only wal":
        assert Path(report.moved[0]).read_bytes() == (content[:100] if harm == "cut" else b"?" * len(content))
    assert (Path(report.moved[-1]) / "x.journal").read_bytes() == b"held"
    assert same(asyncio.run(service.load())) == same(service.contents)


def test_intact_catalog_is_replaced_only_on_request(service: Service) -> None:
    before = {path.name: path.read_bytes() for path in service.folder.iterdir()}
    with pytest.raises(CatalogError, match="has 2 contexts; --replace"):
        run(service.rebuild_request())
    assert {name: (service.folder / name).read_bytes() for name in before if "holder" not in name} == {
        name: content for name, content in before.items() if "holder" not in name
    }
    report = run(service.rebuild_request(may_replace=True))
    assert Path(report.moved[0]).name.startswith("catalog.db.damaged-")
    assert same(asyncio.run(service.load())) == same(service.contents)
    assert read_only_catalog(service.folder).epoch == EPOCH, "the intact catalog was read"


def test_new_catalog_without_contexts_may_be_replaced(service: Service) -> None:
    service.lose()
    fresh = asyncio.run(service.load())
    assert not fresh.contexts
    report = run(service.rebuild_request())
    assert Path(report.moved[0]).name.startswith("catalog.db.damaged-")
    assert same(asyncio.run(service.load())) == same(service.contents)


def test_damage_on_storage_is_reported_and_the_rest_restored(service: Service) -> None:
    manifest = service.manifest(MORE)
    service.store.put(manifest.pieces[0].name, [b"short"])
    report = run(service.rebuild_request(may_replace=True))
    assert [each.name for each in report.contexts] == ["twig"]
    assert [each.name for each in report.skipped] == ["book"]
    assert "has 5 bytes, expected 40" in report.skipped[0].reason
    found = asyncio.run(service.load())
    assert [each.id for each in found.segments] == [0, 2]
    assert found.next_segment == 4
    assert not found.damaged_contexts


def test_damaged_newest_note_restores_no_older_one(service: Service) -> None:
    name = deletion("book", 2, service.service_id).place.name
    service.store.put(name, [service.store.get(name)[:-3]])
    report = run(service.rebuild_request(may_replace=True))
    assert [each.name for each in report.contexts] == ["twig"]
    assert [each.name for each in report.skipped] == ["book"]


def test_services_that_share_a_storage_are_distinguished(service: Service) -> None:
    other = "0f" * 16
    put_manifest(service.store, manifest_of(segment(8, 5), other, service.identity.digest))
    put_note(service.store, note_of(context("theirs", 8, 5), 3, other))
    put_manifest(service.store, manifest_of(segment(9, 5), service.service_id, "another checkpoint"))
    with pytest.raises(InvalidArgument, match=rf"--service: .*{other} \(1 context\)"):
        run(service.rebuild_request(may_replace=True))
    report = run(service.rebuild_request(may_replace=True, service=service.service_id))
    assert (len(report.contexts), report.other_manifests) == (2, 1)
    report = run(service.rebuild_request(may_replace=True, service=other))
    assert [each.name for each in report.contexts] == ["theirs"]
    assert asyncio.run(service.load()).service_id == other


def test_folder_of_a_running_service_is_refused(service: Service) -> None:
    resident = DataFolder.open(service.data_dir, service.identity.digest, str(MODEL), service.identity.facts)
    try:
        with pytest.raises(CatalogError, match="is in use by process"):
            run(service.rebuild_request(may_replace=True))
    finally:
        resident.close()


def test_different_dtype_is_a_different_checkpoint(service: Service) -> None:
    with pytest.raises(InvalidArgument, match="--from: no contexts of this checkpoint"):
        run(service.rebuild_request(dtype="bfloat16"))


def test_command_reports_its_result(service: Service) -> None:
    (service.folder / "catalog.db").write_bytes(b"nothing")
    arguments = [f"--from={service.url}", f"--data-dir={service.data_dir}"]
    done = _command(*arguments)
    assert done.returncode == 0, done.stderr
    assert "moved aside: " in done.stdout
    assert f"has 2 contexts of service {service.service_id}" in done.stdout
    model, data_dir = shlex.quote(str(embedded_model())), shlex.quote(str(service.data_dir))
    assert f"longleaf serve --model {model} --data-dir {data_dir}" in done.stdout
    is_elsewhere = service.url != str(service.folder / "snapshots")
    assert (f"--snapshot-url {shlex.quote(service.url)}" in done.stdout) == is_elsewhere
    done = _command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--replace" in done.stderr
    done = _command(*arguments, "--replace", "--json")
    assert json.loads(done.stdout)["contexts"] == [{"name": "book", "tokens": 340}, {"name": "twig", "tokens": 270}]
    done = _command("--from=nothing://there", arguments[1])
    assert done.returncode == 2
    assert done.stderr.startswith("error: --from: ")


def _command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*CLI, "contexts", "rebuild", *arguments]
    return forked.run(command)


async def test_damaged_catalog_error_names_the_command(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(b"cut")
    with pytest.raises(CatalogError, match="longleaf contexts rebuild"):
        await Catalog.open(path)
