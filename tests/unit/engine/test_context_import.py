"""Contexts that are imported into an engine: the state after they are adopted, and the remains if they are not."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from coordinator.engine.context_transfer import ContextExport, ContextImport
from coordinator.engine.engine import Engine
from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.persistence.catalog.records import SnapshotRecord
from coordinator.persistence.snapshots.kv_format import KvFormat
from coordinator.persistence.snapshots.snapshot_index import RetentionPolicy
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, StorageUnavailable
from longleaf.positions import Rope
from longleaf.rank_protocol.snapshots import max_header_bytes
from longleaf.rank_protocol.step import Prefill, Restore
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.manifest import PieceRef, SegmentManifest, encode_manifest
from longleaf.storage.names import Attempt
from longleaf.storage.segment_record import SegmentRecord
from tests.support.catalog import context, segment
from tests.support.coming import comes
from tests.support.fakes.ranks import FakeRanks
from tests.support.running import running
from tests.support.storing import FORM, NOW, Service, Storage, ask, ingest, ingest_two, serving

pytestmark = pytest.mark.timeout(60)
DEMAND = RetentionPolicy("demand", grace=NOW)
AWAY = StorageUnavailable("the disk is full")
BOOK = context("book", 7, 30, capacity=2_000)


async def move(exporting: ContextExport, importing: ContextImport, storage: Storage) -> list[SegmentRecord]:
    """Copies all exported objects to the import; returns the new segment records. The ranks learn of the copied
    objects."""
    found = list[SegmentRecord]()
    for each in exporting.segments:
        parent = found[-1].id if found else None
        found.append(replace(each, id=importing.new_segment(), parent=parent))
        manifest, attempt = exporting.manifests[each.id], importing.new_attempt(found[-1].id)
        pieces = [replace(piece, name=attempt.piece(i)) for i, piece in enumerate(manifest.pieces)]
        for old, new in zip(manifest.pieces, pieces, strict=True):
            await importing.put(new.name, await exporting.read(old))
            storage.pieces[new.name] = frozenset(position for run in new.runs for position in range(*run))
        moved = replace(manifest, service=attempt.service, segment=attempt.segment, pieces=tuple(pieces))
        await importing.put(attempt.manifest, encode_manifest(moved))
    return found


def snapshots_of(segments: Sequence[SegmentRecord], storage: Storage) -> list[SnapshotRecord]:
    """Snapshot records of segments whose manifests are on a storage."""
    names = [name for name in storage.names if name.endswith("/manifest")]
    pairs = zip(segments, names, strict=True)
    return [SnapshotRecord(segment=one.id, manifest=name, form=f"{FORM}|", num_bytes=9) for one, name in pairs]


async def test_imported_context_is_evicted_and_restored_on_request() -> None:
    old, new = Storage(), Storage()
    async with serving(old, policy=DEMAND) as before, serving(new, policy=DEMAND) as after:
        await ingest_two(before.engine)
        await ingest(after.engine, range(7), "other")
        exporting = await before.engine.transfers.open_export("book", with_keys=True)
        importing = await after.engine.transfers.begin_import(exporting.context)
        assert (importing.form, importing.fingerprint) == (f"{FORM}|", "checkpoint")
        segments = await move(exporting, importing, new)
        assert len(after.snapshots._needed()) == 2, "no object of it is deleted"
        record = replace(exporting.context, segment=segments[-1].id)
        adopted = await importing.adopt(record, segments, snapshots_of(segments, new))
        assert (adopted.state, adopted.tokens) == ("evicted", 60)
        assert not after.snapshots._needed()
        count = new.num_objects
        await importing.drop()
        assert new.num_objects == count, "its objects stay"
        assert await ask(after.engine) == await ask(before.engine)
        works = [plan.work for plan in after.ranks.plans]
        ids = {each.id for each in segments}
        assert ids == {work.segment for work in works if isinstance(work, Restore)}
        assert not any(isinstance(work, Prefill) and work.path[-1] in ids for work in works)


def test_pieces_that_no_rank_can_load_are_rejected() -> None:
    form, place = KvFormat("blocks of 4; 0.keys F32 2x4x8|blocks of 4; 1.keys F16 1x4x8", 4), Attempt("s", "s-1", "a")
    most = 3 * 4 * 64 + max_header_bytes(1, 1)
    manifest = SegmentManifest(
        service="s",
        fingerprint="",
        form=form.text,
        segment="s-1",
        parent="s-0",
        start=6,
        num_tokens=9,
        rope=Rope(),
        pieces=(PieceRef(name=place.piece(0), runs=((6, 15),), num_bytes=most, digest=""),),
        windows=PieceRef(name=place.windows(0), runs=((9, 15),), num_bytes=2 * 64 + max_header_bytes(1, 1), digest=""),
        token_ids=bytes(36),
    )
    assert manifest.windows is not None
    manifest.check()
    form.check(manifest)
    larger = replace(manifest, pieces=(replace(manifest.pieces[0], num_bytes=most + 1),))
    with pytest.raises(InvalidArgument, match=f"pieces: 3 blocks have at most {most:,} bytes"):
        form.check(larger)
    larger = replace(manifest, windows=replace(manifest.windows, num_bytes=1 << 30))
    with pytest.raises(InvalidArgument, match="windows: 2 blocks have at most"):
        form.check(larger)
    with pytest.raises(InvalidArgument, match="windows: these ranks store no windows"):
        KvFormat("blocks of 4; 0.keys F32 2x4x8|", 4).check(manifest)
    with pytest.raises(InvalidArgument, match="pieces: .* whole blocks of 2"):
        KvFormat(form.text, 2).check(replace(manifest, pieces=(replace(manifest.pieces[0], runs=((6, 9), (9, 15))),)))


async def test_context_with_pieces_ending_inside_a_block_is_recomputed() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        importing = await arrive(service)
        reported = segment(number := importing.new_segment(), BOOK.num_tokens)
        attempt, runs = importing.new_attempt(number), [(0, 5), (5, 30)]
        pieces = tuple(
            PieceRef(name=attempt.piece(i), runs=(run,), num_bytes=run[1] - run[0], digest="00")
            for i, run in enumerate(runs)
        )
        storage.pieces |= {piece.name: frozenset(range(*piece.runs[0])) for piece in pieces}
        manifest = SegmentManifest(
            service=attempt.service,
            fingerprint=importing.fingerprint,
            form=f"{FORM}|",
            segment=attempt.segment,
            parent=None,
            start=0,
            num_tokens=BOOK.num_tokens,
            rope=reported.rope,
            pieces=pieces,
            windows=None,
            token_ids=reported.token_ids.tobytes(),
        )
        await importing.put(attempt.manifest, encode_manifest(manifest))
        await importing.adopt(replace(BOOK, segment=number), [reported], snapshots_of([reported], storage))
        with pytest.raises(InvalidArgument, match="pieces: positions 0 to 5"):
            importing.check(manifest)
        assert len(await ask(service.engine)) == 4
        await comes(lambda: not service.snapshots.is_usable(number))
        assert not service.ranks.num_fetches, "it is damaged before anything is fetched"
        assert len(await ask(service.engine)) == 4


async def test_one_damaged_piece_recomputes_the_whole_import() -> None:
    """This includes the piece that is being fetched at that moment."""
    old, new = Storage(), Storage()
    async with serving(old, policy=DEMAND) as before, serving(new, policy=DEMAND) as after:
        await ingest_two(before.engine)
        exporting = await before.engine.transfers.open_export("book", with_keys=True)
        importing = await after.engine.transfers.begin_import(exporting.context)
        segments = await move(exporting, importing, new)
        record = replace(exporting.context, segment=segments[-1].id)
        await importing.adopt(record, segments, snapshots_of(segments, new))
        ids = [each.id for each in segments]
        assert list(after.snapshots.imported_with(ids[0])) == ids
        for name in [name for name in new.pieces if f"-{ids[0]}/" in name]:
            new.pieces[name] = frozenset()  # only pieces of the first segment are damaged
        after.ranks.late = [name for name in new.pieces if f"-{ids[1]}/" in name]
        after.ranks.may_fetch.clear()
        assert await ask(after.engine) == await ask(before.engine)
        await comes(lambda: not any(map(after.snapshots.is_usable, ids)))
        assert not any(isinstance(plan.work, Restore) for plan in after.ranks.plans)
        await after.snapshots.save(ids)
        assert all(map(after.snapshots.is_usable, ids))
        assert not after.snapshots.imported_with(ids[0]), "snapshots that this service wrote are trusted"


async def test_remains_of_an_import_are_never_used_for_another_segment() -> None:
    """Its service was killed; a rebuild of the catalog would trust the manifests that it finds."""
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        importing = await arrive(service)
        attempts = [importing.new_attempt(importing.new_segment()) for _ in range(3)]
        for attempt in attempts:
            await importing.put(attempt.manifest, b"a manifest")
        assert len(storage.lasting.catalog.changes) == 1, "ids are recorded in batches"
    async with serving(storage, policy=DEMAND) as service:
        await ingest_two(service.engine)
        left = {attempt.segment for attempt in attempts}
        assert left.isdisjoint(
            f"{service.snapshots.service_id}-{number}" for number in service.engine.named("book").path.ids
        )
        number = (await arrive_as(service, "other")).new_segment()
        assert f"{service.snapshots.service_id}-{number}" not in left


async def arrive_as(service: Service, name: str) -> ContextImport:
    return await service.engine.transfers.begin_import(replace(BOOK, id=name))


async def test_nothing_is_stored_if_its_number_cannot_be_recorded() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        importing = await arrive(service)
        attempt = importing.new_attempt(importing.new_segment())
        storage.lasting.catalog.failures.append(AWAY)
        with pytest.raises(StorageUnavailable):
            await importing.put(attempt.piece(0), b"keys")
        assert not storage.num_objects
        await importing.put(attempt.piece(0), b"keys")
        assert storage.num_objects == 1


async def test_persisted_context_that_cannot_be_loaded_does_not_prevent_a_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage, adopt_context = Storage(), ContextTable.adopt
    async with serving(storage, policy=DEMAND) as service:
        await ingest_two(service.engine)
        await ingest(service.engine, range(40), "other")

    def fail(self: ContextTable, found: NamedContext) -> None:
        if found.id == "book":
            raise KeyError("an archive damaged it")
        adopt_context(self, found)

    monkeypatch.setattr(ContextTable, "adopt", fail)
    async with serving(storage, policy=DEMAND) as service:
        service.engine.preload()
        assert [each.id for each in service.engine.list_contexts()] == ["other"]
        service.engine.audit()
    assert "cannot load context book" in caplog.text
    monkeypatch.undo()
    async with serving(storage, policy=DEMAND) as service:
        assert len(await ask(service.engine)) == 4, "it is still in the catalog"


async def arrive(service: Service) -> ContextImport:
    """Begins the import of a context with one segment, without keys."""
    return await service.engine.transfers.begin_import(BOOK)


async def adopt(importing: ContextImport, rope: Rope | None = None) -> ContextRecord:
    """Adopts the imported context."""
    number = importing.new_segment()
    record = replace(BOOK, segment=number)
    reported = segment(number, 30) if rope is None else segment(number, 30, rope=rope)
    await importing.adopt(record, [reported], [])
    return record


async def test_dropped_import_leaves_nothing_on_storage() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        importing = await arrive(service)
        attempt = importing.new_attempt(importing.new_segment())
        await importing.put(attempt.piece(0), b"keys")
        assert storage.num_objects == 1
        await importing.drop()
        await importing.drop()
        assert not storage.num_objects
        assert not service.snapshots._needed()
        with pytest.raises(NotFound):
            service.engine.transfers.get_context("book")


async def test_drop_succeeds_if_storage_fails() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        importing = await arrive(service)
        attempt = importing.new_attempt(importing.new_segment())
        await importing.put(attempt.piece(0), b"keys")
        storage.files.fail(9)
        await importing.drop()
        assert not service.snapshots._needed(), "a sweep will find it"


async def test_ids_are_unique() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        one, other = await arrive(service), await arrive(service)
        given = [one.new_segment(), other.new_segment(), one.new_segment()]
        await ingest(service.engine, range(8), "other")
        given += [service.engine.named("other").path.ids[-1], one.new_segment()]
        assert given == sorted(set(given))


async def test_name_is_checked_at_begin_and_at_adoption() -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        importing = await arrive(service)
        await ingest(service.engine, range(8))
        with pytest.raises(AlreadyExists):
            await arrive(service)
        with pytest.raises(AlreadyExists):
            await adopt(importing)
        assert service.engine.get_context("book").tokens == 8
        await service.engine.delete_context("book")
        await adopt(importing)
        assert service.engine.get_context("book").tokens == 30


async def test_failed_adoption_can_be_retried() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        importing = await arrive(service)
        attempt = importing.new_attempt(importing.new_segment())
        await importing.put(attempt.piece(0), b"keys")
        storage.lasting.catalog.failures.append(AWAY)
        with pytest.raises(StorageUnavailable):
            await adopt(importing)
        assert service.snapshots._needed(), "it may yet be adopted"
        with pytest.raises(NotFound):
            service.engine.transfers.get_context("book")
        await adopt(importing)
        assert storage.lasting.contexts == {"book": 30}


async def test_context_with_another_rope_is_refused() -> None:
    storage = Storage()
    async with serving(storage, policy=DEMAND) as service:
        importing = await arrive(service)
        with pytest.raises(InvalidArgument, match="rotates contexts of 2,000 positions differently") as caught:
            await adopt(importing, Rope(scaled_for=4096))
        assert caught.value.field == "rope"
        assert not storage.lasting.contexts


@pytest.mark.parametrize(
    ("capacity", "num_tokens", "message"),
    [(3_001, 30, "3,001 exceeds 3,000"), (2_000, 3_001, "num_tokens: 3,001 exceeds 3,000")],
)
async def test_contexts_that_are_too_long_are_refused_immediately(capacity: int, num_tokens: int, message: str) -> None:
    async with serving(Storage(), policy=DEMAND) as service:
        too_long = replace(BOOK, capacity=capacity, num_tokens=num_tokens)
        with pytest.raises(InvalidArgument, match=message):
            await service.engine.transfers.begin_import(too_long)
        await service.engine.transfers.begin_import(replace(BOOK, capacity=3_000, num_tokens=3_000))


async def test_keys_are_accepted_only_if_they_can_be_restored() -> None:
    async with serving(Storage(), policy=RetentionPolicy("off", grace=NOW)) as service:
        importing = await arrive(service)
        assert importing.form is None
        await adopt(importing)
        assert service.engine.transfers.get_context("book").state == "evicted"
    storage = Storage()
    async with serving(storage, storage.ranks(form=""), DEMAND) as service:
        assert (await arrive(service)).form is None


async def test_service_without_storage_only_exports() -> None:
    config = EngineConfig(model="none", world_size=2, chunk_size=32, block_size=4, replicate_below=8)
    async with running(Engine(FakeRanks(2, 100), config, 3000)) as found:
        await ingest(found.engine, range(40))
        exporting = await found.engine.transfers.open_export("book", with_keys=True)
        assert len(exporting.segments) == 1
        assert not exporting.manifests
        await exporting.close()
        with pytest.raises(FailedPrecondition, match="--data-dir"):
            await found.engine.transfers.begin_import(replace(BOOK, id="other"))
