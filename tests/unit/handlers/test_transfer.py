"""Contexts are exported from one engine and imported into another without changes; damage is reported and leaves
nothing behind."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest
from blake3 import blake3
from msgspec.structs import replace

from coordinator.auth.caller import CALLER, Caller
from coordinator.auth.quotas import QuotaEnforcer
from coordinator.auth.tenant_usage import TenantUsage
from coordinator.handlers.resumable_sessions import KEEP_SECONDS, TRIM_SECONDS
from coordinator.handlers.transfer.exports import Exports
from coordinator.handlers.transfer.imports import ImportSessions
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.context_archive import reader
from longleaf.context_archive.records import PIECE_BYTES, RUN_BYTES, SEGMENT_BYTES
from longleaf.credentials import Quotas
from longleaf.errors import (
    AlreadyExists,
    CheckpointChanged,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    LongleafError,
    NotFound,
    ResourceExhausted,
    StorageUnavailable,
    Unavailable,
)
from longleaf.fingerprint import Fingerprint
from longleaf.storage.manifest import SegmentManifest, decode_manifest
from longleaf.types import ExportContext, ExportedArchive, ImportHeader, ImportProgress
from tests.support.archives import FORM, Packable, packable, packed_early
from tests.support.fakes.transfer_engine import FakeTransferEngine
from tests.support.service import FakeEngine
from tests.support.timers import Timers
from tests.support.transfer_engines import empty_transfer_engine, sending, transfer_engine_of

pytestmark = pytest.mark.timeout(60)

VOCABULARY = 1 << 17
NOW = 10.0
MOBY = packable()
WHOLE = MOBY.packed()
MakeImports = Callable[..., ImportSessions]


@pytest.fixture
async def threads() -> AsyncIterator[TokenizerPool]:
    threads = TokenizerPool(1)
    yield threads
    await threads.close()


@pytest.fixture
async def make_imports() -> AsyncIterator[MakeImports]:
    """Creates import sessions for an engine, on stopped clocks."""
    made = list[ImportSessions]()

    def imports(engine: FakeTransferEngine, timers: Timers | None = None, **limits: Any) -> ImportSessions:
        timers = timers or Timers()
        made.append(ImportSessions(engine, VOCABULARY, lambda: timers.now, timers, lambda: NOW, **limits))
        return made[-1]

    yield imports
    for one in made:
        await one.close()


@pytest.fixture
def export_context(threads: TokenizerPool) -> Callable[..., Any]:
    """Exports a context from an engine; returns the archive and its bytes."""

    async def run(engine: FakeTransferEngine, context: str = "moby", **options: Any) -> tuple[ExportedArchive, bytes]:
        exports = Exports(engine, threads, FakeEngine().describe)
        archive, *data = [one async for one in exports.run(ExportContext(context=context, **options))]
        assert isinstance(archive, ExportedArchive)
        assert engine.num_open == 0
        return archive, b"".join(one for one in data if isinstance(one, bytes))

    return run


async def import_context(
    imports: ImportSessions, data: bytes, header: ImportHeader | None = None, **cut: int
) -> list[ImportProgress]:
    async with aclosing(imports.run(sending(header or ImportHeader(), data, **cut))) as reports:
        return [report async for report in reports]


async def import_until(imports: ImportSessions, data: bytes, header: ImportHeader, end: int, start: int = 0) -> int:
    """Runs a stream whose client disconnects after `end` bytes; returns the first offset that was sent."""
    has_sent = asyncio.Event()

    async def pieces() -> AsyncIterator[Any]:
        async for piece in sending(header, data, start, end=end):
            yield piece
        has_sent.set()
        await asyncio.Event().wait()

    reports = list[ImportProgress]()

    async def listen() -> None:
        async with aclosing(imports.run(pieces())) as reported:
            async for report in reported:
                reports.append(report)

    task = asyncio.create_task(listen())
    await has_sent.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return reports[0].received_bytes


def check_imported(old: Packable, engine: FakeTransferEngine, name: str = "moby") -> None:
    """The imported context equals the exported one, with its keys, under segment ids of the new engine only."""
    record, segments, manifests = engine.contexts[name]
    head = old.head
    assert (record.num_tokens, record.ends, record.capacity) == (head.num_tokens, head.ends, head.capacity)
    assert (record.created, record.updated, record.last_used) == (head.created, head.updated, NOW)
    assert (record.display_name, record.is_pinned, record.expires) == (head.display_name, head.is_pinned, head.expires)
    assert record.segment == segments[-1].id
    assert [one.parent for one in segments] == [None, *(one.id for one in segments[:-1])]
    assert not {one.id for one in segments} & {one.id for one in old.path}
    for before, now in zip(old.path, segments, strict=True):
        assert (now.start, now.rope, now.token_ids) == (before.start, before.rope, before.token_ids)
        manifest, was = manifests[now.id], old.manifests[before.id]
        manifest.check()
        assert (manifest.service, manifest.segment) == (engine.service, f"{engine.service}-{now.id}")
        assert manifest.parent == (None if now.parent is None else f"{engine.service}-{now.parent}")
        assert [(one.runs, one.digest) for one in manifest.pieces] == [(one.runs, one.digest) for one in was.pieces]
        objects = zip(manifest.objects, was.objects, strict=True)
        assert all(engine.objects[name] == old.objects[old_name] for name, old_name in objects)
    assert all(name.startswith(f"services/{engine.service}/") for name in engine.objects)
    assert engine.num_imports == 0


async def test_imported_context_equals_the_exported_one(export_context: Any, make_imports: MakeImports) -> None:
    engine, old = empty_transfer_engine(), transfer_engine_of(MOBY)
    archive, data = await export_context(old)
    assert (archive.num_bytes, archive.digest, data) == (
        len(data),
        (await export_context(old))[0].digest,
        (await export_context(old))[1],
    )
    reports = await import_context(make_imports(engine), data)
    assert (reports[0].received_bytes, reports[-1].received_bytes) == (0, len(data))
    assert reports[-1].context is not None
    assert (reports[-1].context.id, reports[-1].context.state, reports[-1].key_tokens) == ("moby", "evicted", 11)
    check_imported(MOBY, engine)


async def test_imported_context_is_exported_unchanged(export_context: Any, make_imports: MakeImports) -> None:
    engine = empty_transfer_engine()
    first = (await export_context(transfer_engine_of(MOBY)))[1]
    await import_context(make_imports(engine), first)
    assert (await export_context(engine))[1] == first


async def test_export_resumes_at_any_byte(export_context: Any) -> None:
    archive, data = await export_context(transfer_engine_of(MOBY))
    for offset in range(0, len(data) + 1, 97):
        assert await export_context(transfer_engine_of(MOBY), offset=offset, digest=archive.digest) == (
            archive,
            data[offset:],
        )
    with pytest.raises(InvalidArgument, match="offset"):
        await export_context(transfer_engine_of(MOBY), offset=len(data) + 1, digest=archive.digest)


async def test_export_of_a_changed_context_is_not_resumed(export_context: Any) -> None:
    old = transfer_engine_of(MOBY)
    archive, _ = await export_context(old)
    record = old.contexts["moby"].context
    old.contexts["moby"] = old.contexts["moby"]._replace(context=replace(record, display_name="The Whale"))
    with pytest.raises(FailedPrecondition, match="contexts/moby: it has changed"):
        await export_context(old, offset=10, digest=archive.digest)
    assert old.num_open == 0


async def test_use_of_a_context_does_not_change_its_archive(export_context: Any) -> None:
    old = transfer_engine_of(MOBY)
    archive, _ = await export_context(old)
    record = replace(old.contexts["moby"].context, last_used=99.0, num_hits=7)
    old.contexts["moby"] = old.contexts["moby"]._replace(context=record)
    assert (await export_context(old))[0] == archive


async def test_exports_raise_errors_of_the_engine(export_context: Any, threads: TokenizerPool) -> None:
    old = transfer_engine_of(MOBY)
    with pytest.raises(NotFound):
        await export_context(old, "dick")
    old.failures = [StorageUnavailable("away")]
    with pytest.raises(StorageUnavailable):
        await export_context(old)
    old.objects.popitem()
    with pytest.raises(DataLoss):
        await export_context(old)
    assert old.num_open == 0


async def test_concurrent_exports_are_limited(threads: TokenizerPool) -> None:
    old = transfer_engine_of(MOBY)
    exports = Exports(old, threads, FakeEngine().describe, max_exports=1)
    async with aclosing(exports.run(ExportContext(context="moby"))) as first:
        await anext(first)
        with pytest.raises(ResourceExhausted, match="exports"):
            await anext(exports.run(ExportContext(context="moby")))
    assert old.num_open == 0
    await anext(exports.run(ExportContext(context="moby")))


@pytest.mark.parametrize("why", ["left at home", "no storage", "another form"])
async def test_import_without_keys_contains_only_token_ids(
    export_context: Any, make_imports: MakeImports, why: str
) -> None:
    engine = empty_transfer_engine({"no storage": None, "another form": "int8"}.get(why, FORM))
    _, data = await export_context(transfer_engine_of(MOBY), with_keys=why != "left at home")
    reports = await import_context(make_imports(engine), data)
    assert reports[-1].key_tokens == 0
    record, segments, manifests = engine.contexts["moby"]
    assert (manifests, engine.objects) == ({}, {})
    assert [one.token_ids for one in segments] == [MOBY.path[0].token_ids[:6], MOBY.path[1].token_ids]
    assert (record.num_tokens, segments[1].start, segments[1].parent) == (11, 6, segments[0].id)


async def test_keys_of_a_part_of_the_segments_are_imported(make_imports: MakeImports) -> None:
    engine, given = empty_transfer_engine(), packable(((8, 8), (5, 5), (4, 4)), (True, False, True))
    reports = await import_context(make_imports(engine), given.packed())
    assert reports[-1].key_tokens == 12
    assert len(engine.contexts["moby"].manifests) == 2


async def test_archives_of_early_versions_import_partly_used_segments(make_imports: MakeImports) -> None:
    engine, given = empty_transfer_engine(), packable(((8, 6), (5, 5)))
    *_, last = await import_context(make_imports(engine), packed_early(given))
    assert last.context is not None
    assert (last.context.tokens, last.key_tokens) == (11, 11)


async def test_context_is_imported_under_another_name(make_imports: MakeImports) -> None:
    engine = empty_transfer_engine()
    await import_context(make_imports(engine), WHOLE, ImportHeader(context="dick"))
    check_imported(MOBY, engine, "dick")


# --- faults ---


async def refused(
    imports: ImportSessions, engine: FakeTransferEngine, data: bytes, error: type[LongleafError], message: str
) -> None:
    for upload_id in ("", "one"):
        with pytest.raises(error, match=message):
            await import_context(imports, data, ImportHeader(upload_id=upload_id))
        await imports.close()
        assert (engine.contexts, engine.objects, engine.num_imports) == ({}, {}, 0)


async def test_truncated_archive_leaves_nothing(make_imports: MakeImports) -> None:
    engine = empty_transfer_engine()
    imports = make_imports(engine)
    for end in range(0, len(WHOLE), 31):
        await refused(imports, engine, WHOLE[:end], InvalidArgument, "archive: it is truncated")


async def test_damaged_archive_leaves_nothing(make_imports: MakeImports) -> None:
    engine = empty_transfer_engine()
    imports = make_imports(engine)
    for place in range(0, len(WHOLE), 13):
        damaged = WHOLE[:place] + bytes([WHOLE[place] ^ 1]) + WHOLE[place + 1 :]
        await refused(imports, engine, damaged, InvalidArgument, "archive: ")


async def test_archive_of_another_model_is_refused_with_the_differences(make_imports: MakeImports) -> None:
    engine = empty_transfer_engine()
    other = Fingerprint("cd" * 32, {"config.json": "01", "model.safetensors": "03", "tokenizer.json": "04"})
    given = packable()
    given.head = replace(given.head, fingerprint=other)
    message = r"'fake' has fingerprint cdcdcdcdcdcdcdcd; .* has abababababababab; .* tokenizer.json, model.safetensors$"
    await refused(make_imports(engine), engine, given.packed(), CheckpointChanged, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": "../etc"}, r"config.name: .*give another name"),
        ({"expires": 9.0, "is_pinned": False}, "the context expired 1 s ago"),
        ({"created": float("nan")}, "an invalid time"),
        ({"updated": -1.0}, "an invalid time"),
        ({"expires": 1e300}, "an invalid time"),
        ({"capacity": 1 << 30}, "capacity"),
    ],
)
async def test_unacceptable_heads_are_refused(make_imports: MakeImports, changes: dict[str, Any], message: str) -> None:
    engine, given = empty_transfer_engine(), packable()
    given.head = replace(given.head, **changes)
    await refused(make_imports(engine), engine, given.packed(), InvalidArgument, message)


async def test_unknown_token_id_is_refused(make_imports: MakeImports) -> None:
    engine, given = empty_transfer_engine(), packable(keyed=(False, False))
    given.path[1].token_ids[4] = VOCABULARY
    await refused(
        make_imports(engine), engine, given.packed(), InvalidArgument, "a token id outside the vocabulary of 131,072"
    )


async def test_pieces_that_do_not_cover_their_segment_are_refused(make_imports: MakeImports) -> None:
    engine, given = empty_transfer_engine(), packable()
    number, manifest = next(iter(given.manifests.items()))
    given.manifests[number] = replace(manifest, pieces=manifest.pieces[1:])
    await refused(make_imports(engine), engine, given.packed(), InvalidArgument, "the pieces of a segment are invalid")


@pytest.mark.parametrize("cut", [1, 3, 5])
async def test_pieces_that_end_inside_a_block_are_refused(make_imports: MakeImports, cut: int) -> None:
    engine, given = empty_transfer_engine(), packable()
    number, manifest = next(iter(given.manifests.items()))
    (first, second), end = manifest.pieces, manifest.end
    pieces = (replace(first, runs=((0, cut),)), replace(second, runs=((cut, end),)))
    given.manifests[number] = replace(manifest, pieces=pieces)
    message = "the pieces of a segment are invalid: pieces: .* blocks of 4"
    await refused(make_imports(engine), engine, given.packed(), InvalidArgument, message)


async def test_windows_before_their_segment_are_refused(make_imports: MakeImports) -> None:
    engine, given = empty_transfer_engine(), packable()
    number, manifest = list(given.manifests.items())[1]
    assert manifest.windows is not None
    windows = replace(manifest.windows, runs=((manifest.start - 1, manifest.end),))
    given.manifests[number] = replace(manifest, windows=windows)
    message = "the pieces of a segment are invalid: windows: "
    await refused(make_imports(engine), engine, given.packed(), InvalidArgument, message)


async def test_archives_are_decoded_off_the_event_loop_and_counted(
    make_imports: MakeImports, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, header = empty_transfer_engine(), ImportHeader(upload_id="one")
    imports, threads, kinds = make_imports(engine), list[int](), list[str]()

    def note(kind: str, call: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.get_ident())
            kinds.append(kind)
            return call(*args, **kwargs)

        return recorded

    monkeypatch.setattr(reader, "decode", note("head", reader.decode))
    monkeypatch.setattr(reader, "decode_segment", note("segment", reader.decode_segment))
    monkeypatch.setattr(SegmentManifest, "check", note("manifest", SegmentManifest.check))
    await import_until(imports, WHOLE, header, len(WHOLE) - 50)
    assert kinds == ["head", *["segment", "manifest"] * 2]
    assert threading.get_ident() not in threads
    (session,) = imports._sessions
    num_described = SEGMENT_BYTES * 2 + PIECE_BYTES * 6 + RUN_BYTES * 6
    assert session.importer.num_buffered_bytes >= num_described + 2 * 4 * 11


async def test_import_without_storage_is_refused(make_imports: MakeImports) -> None:
    engine = empty_transfer_engine()
    engine.is_durable = False
    await refused(make_imports(engine), engine, WHOLE, FailedPrecondition, "--data-dir")


async def test_existing_name_is_refused_before_the_rest_is_sent(make_imports: MakeImports) -> None:
    engine = transfer_engine_of(packable(seed=9))
    with pytest.raises(AlreadyExists, match="contexts/moby"):
        await import_context(make_imports(engine), WHOLE, end=600, size=600)


async def test_name_taken_during_an_import_is_refused(make_imports: MakeImports) -> None:
    engine = empty_transfer_engine()
    imports = make_imports(engine)
    header = ImportHeader(upload_id="one")
    await import_until(imports, WHOLE, header, len(WHOLE) - 50)
    engine.contexts |= transfer_engine_of(packable(seed=9)).contexts
    with pytest.raises(AlreadyExists, match="contexts/moby"):
        await import_context(imports, WHOLE, header, start=len(WHOLE) - 50)
    await imports.close()
    assert (engine.objects, engine.num_imports) == ({}, 0)


async def test_wrong_request_order_is_refused(make_imports: MakeImports) -> None:
    imports = make_imports(empty_transfer_engine())
    with pytest.raises(InvalidArgument, match="config: must be in the first"):
        [report async for report in imports.run(sending(None, WHOLE))]

    async def twice() -> AsyncIterator[Any]:
        yield ImportHeader()
        yield ImportHeader()

    with pytest.raises(InvalidArgument, match="config: must be in the first"):
        [report async for report in imports.run(twice())]
    with pytest.raises(InvalidArgument, match=r"chunk.offset: is 100, but 0 bytes have been received"):
        await import_context(imports, WHOLE, start=100)
    with pytest.raises(InvalidArgument, match=r"config.total_size_bytes: more than 500 bytes"):
        await import_context(imports, WHOLE, ImportHeader(total_bytes=500))


# --- streams that break ---


async def test_import_resumes_at_the_next_byte(make_imports: MakeImports) -> None:
    for end in range(0, len(WHOLE), 61):
        engine = empty_transfer_engine()
        imports, header = make_imports(engine), ImportHeader(upload_id="one", total_bytes=len(WHOLE))
        await import_until(imports, WHOLE, header, end)
        reports = await import_context(imports, WHOLE, header, start=end)
        assert reports[0].received_bytes == end
        check_imported(MOBY, engine)


async def test_received_bytes_are_skipped(make_imports: MakeImports) -> None:
    engine, header = empty_transfer_engine(), ImportHeader(upload_id="one")
    imports = make_imports(engine)
    await import_until(imports, WHOLE, header, 700)
    assert await import_until(imports, WHOLE, header, 900, start=300) == 700
    assert (await import_context(imports, WHOLE, header))[0].received_bytes == 900
    check_imported(MOBY, engine)


async def test_interrupted_import_without_an_upload_id_leaves_nothing(make_imports: MakeImports) -> None:
    engine = empty_transfer_engine()
    imports = make_imports(engine)
    await import_until(imports, WHOLE, ImportHeader(), 1000)
    await imports.close()
    assert (engine.objects, engine.num_imports) == ({}, 0)


async def test_repeated_completed_import_returns_its_result(make_imports: MakeImports) -> None:
    engine, header = empty_transfer_engine(), ImportHeader(upload_id="one")
    imports = make_imports(engine)
    first = await import_context(imports, WHOLE, header)
    assert await import_context(imports, b"", header) == first[-1:]
    later = await import_context(make_imports(engine), WHOLE, header)  # as after a restart
    assert (later[-1].context, later[-1].key_tokens) == (first[-1].context, None)
    assert later[-1].received_bytes < len(WHOLE)
    engine.contexts.clear()
    assert (await import_context(imports, WHOLE, header))[0].received_bytes == 0
    check_imported(MOBY, engine)


@pytest.mark.parametrize("num_calls", range(9))
async def test_temporary_storage_failure_loses_nothing(make_imports: MakeImports, num_calls: int) -> None:
    engine, header = empty_transfer_engine(), ImportHeader(upload_id="one")
    imports, at = make_imports(engine), 0
    answer, left = engine.answer, [num_calls]

    async def failing() -> None:
        left[0] -= 1
        if left[0] == -1:
            raise StorageUnavailable("away")
        await answer()

    engine.answer = failing  # type: ignore[method-assign]
    with pytest.raises(StorageUnavailable):
        await import_context(imports, WHOLE, header)
    reports = await import_context(imports, WHOLE, header, start=at)
    assert reports[-1].context is not None
    check_imported(MOBY, engine)


async def test_import_resumes_after_a_disconnect_during_a_write(make_imports: MakeImports) -> None:
    engine, header = empty_transfer_engine(), ImportHeader(upload_id="one")
    imports = make_imports(engine)
    engine.is_answering.clear()
    first = asyncio.create_task(import_context(imports, WHOLE, header))
    await engine.is_requested.wait()
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    second = asyncio.create_task(import_context(imports, WHOLE, header))
    await asyncio.sleep(0)
    engine.is_answering.set()
    assert (await second)[0].received_bytes > 0
    assert engine.num_cancelled == 0
    check_imported(MOBY, engine)


async def test_import_completes_after_a_disconnect_during_adoption(make_imports: MakeImports) -> None:
    engine, header = empty_transfer_engine(), ImportHeader(upload_id="one")
    imports = make_imports(engine)
    await import_until(imports, WHOLE, header, len(WHOLE))
    engine.is_requested.clear()
    engine.is_answering.clear()
    first = asyncio.create_task(import_context(imports, b"", header))
    await engine.is_requested.wait()
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    engine.is_answering.set()
    assert (await import_context(imports, b"", header))[-1].context is not None
    assert engine.num_cancelled == 0
    check_imported(MOBY, engine)


async def test_newest_stream_continues(make_imports: MakeImports) -> None:
    engine, header = empty_transfer_engine(), ImportHeader(upload_id="one")
    imports, more = make_imports(engine), asyncio.Event()

    async def slow() -> AsyncIterator[Any]:
        async for piece in sending(header, WHOLE, end=500):
            yield piece
        await more.wait()
        async for piece in sending(None, WHOLE, 500):
            yield piece

    async def listen() -> None:
        async for _ in imports.run(slow()):
            is_open.set()

    is_open = asyncio.Event()
    old = asyncio.create_task(listen())
    await is_open.wait()
    await import_context(imports, WHOLE, header)
    more.set()
    with pytest.raises(Unavailable, match="another stream"):
        await old
    check_imported(MOBY, engine)


async def test_silent_client_times_out_and_can_resume(make_imports: MakeImports) -> None:
    engine, header = empty_transfer_engine(), ImportHeader(upload_id="one")
    imports = make_imports(engine, idle_seconds=0.01)

    async def silent() -> AsyncIterator[Any]:
        async for piece in sending(header, WHOLE, end=500):
            yield piece
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match="sent nothing"):
        [report async for report in imports.run(silent())]
    assert (await import_context(imports, WHOLE, header))[0].received_bytes == 500
    check_imported(MOBY, engine)


async def test_abandoned_import_leaves_nothing(make_imports: MakeImports) -> None:
    engine, timers = empty_transfer_engine(), Timers()
    imports, header = make_imports(engine, timers), ImportHeader(upload_id="one")
    await import_until(imports, WHOLE, header, 1000)
    timers.advance(KEEP_SECONDS - TRIM_SECONDS)
    assert (len(engine.objects) > 0, engine.num_imports) == (True, 1)
    timers.advance(TRIM_SECONDS)
    timers.advance(TRIM_SECONDS)
    await imports.close()
    assert (engine.objects, engine.num_imports) == ({}, 0)
    assert await import_until(imports, WHOLE, header, 100) == 0


async def test_concurrent_imports_are_limited(make_imports: MakeImports) -> None:
    engine = empty_transfer_engine()
    imports = make_imports(engine, max_imports=2)
    headers = [ImportHeader(context=f"moby-{number}", upload_id="one") for number in range(4)]
    for header in headers[:3]:  # exports without a reader are evicted
        await import_until(imports, WHOLE, header, 1000)
    assert [await import_until(imports, WHOLE, header, 0) for header in headers[2:0:-1]] == [1000, 1000]
    open_streams = [imports.run(sending(header, WHOLE)) for header in headers[:3]]
    await anext(open_streams[0])
    await anext(open_streams[1])
    with pytest.raises(ResourceExhausted, match="imports: 2 are open"):
        await anext(open_streams[2])
    for stream in open_streams:
        await stream.aclose()


async def test_concurrent_imports_respect_the_quota(make_imports: MakeImports) -> None:
    CALLER.set(Caller(tenant="acme", quotas=Quotas(contexts=1)))
    engine = empty_transfer_engine()
    imports = make_imports(engine, quotas=QuotaEnforcer(lambda _: TenantUsage(contexts=len(engine.contexts))))
    engine.is_answering.clear()
    coming = [asyncio.create_task(import_context(imports, WHOLE, ImportHeader(context=name))) for name in ("a", "b")]
    for _ in range(100):
        await asyncio.sleep(0)
    engine.is_answering.set()
    outcomes = await asyncio.gather(*coming, return_exceptions=True)
    assert sorted(isinstance(each, ResourceExhausted) for each in outcomes) == [False, True]
    assert len(engine.contexts) == 1


async def test_imports_of_one_tenant_do_not_exclude_others(make_imports: MakeImports) -> None:
    imports = make_imports(empty_transfer_engine(), max_imports=4, tenant_share=1 / 2)
    acme, bolt = (
        [ImportHeader(context=f"{tenant}/{number}", upload_id="one", tenant=tenant) for number in range(3)]
        for tenant in ("acme", "bolt")
    )
    for header in (*bolt[:1], *acme):
        await import_until(imports, WHOLE, header, 1000)
    assert await import_until(imports, WHOLE, bolt[0], 1000) == 1000, "the oldest import of acme was evicted"
    assert await import_until(imports, WHOLE, acme[0], 1000) == 0
    open_streams = [imports.run(sending(header, WHOLE)) for header in acme]
    for stream in open_streams[:2]:
        await anext(stream)
    with pytest.raises(ResourceExhausted, match="2 of tenant acme are open or resumable; the limit is 2"):
        await anext(open_streams[2])
    for stream in open_streams:
        await stream.aclose()


async def test_exports_of_one_tenant_do_not_exclude_others(threads: TokenizerPool) -> None:
    old = transfer_engine_of(*(packable(name=name) for name in ("acme/a", "acme/b", "bolt/a")))
    exports = Exports(old, threads, FakeEngine().describe, max_exports=2, tenant_share=1 / 2)
    async with aclosing(exports.run(ExportContext(context="acme/a"))) as first:
        await anext(first)
        with pytest.raises(ResourceExhausted, match="1 of tenant acme are running"):
            await anext(exports.run(ExportContext(context="acme/b")))
        async with aclosing(exports.run(ExportContext(context="bolt/a"))) as other:
            await anext(other)
    async with aclosing(exports.run(ExportContext(context="acme/b"))) as last:
        await anext(last)


async def test_import_memory_is_bounded(make_imports: MakeImports) -> None:
    given = packable(piece_bytes=3000)
    whole, engine = given.packed(), empty_transfer_engine()
    described = 2 * SEGMENT_BYTES + 6 * (PIECE_BYTES + RUN_BYTES) + 8 * 11 + 300
    imports = make_imports(engine, max_bytes=described + 4000)
    await import_until(imports, whole, ImportHeader(context="a", upload_id="one"), 3500)  # holds most of a piece
    assert len(await import_context(imports, whole, ImportHeader(context="b"))) > 1  # the oldest import is evicted
    imports = make_imports(engine, max_bytes=(most := 4000))
    with pytest.raises(ResourceExhausted, match=f"imports: all imports use too much memory; the limit is {most:,}"):
        await import_context(imports, whole, ImportHeader(context="c"))
    assert await import_until(make_imports(engine), whole, ImportHeader(context="a", upload_id="one"), 0) == 0


async def test_manifests_are_written_last(make_imports: MakeImports) -> None:
    engine = empty_transfer_engine()
    names, answer = list[str](), engine.objects

    class Noting(dict[str, bytes]):
        def __setitem__(self, name: str, content: bytes) -> None:
            names.append(name)
            super().__setitem__(name, content)

    engine.objects = Noting(answer)
    await import_context(make_imports(engine), WHOLE)
    assert [name.endswith("/manifest") for name in names] == [False] * (len(names) - 2) + [True] * 2
    for name in names[-2:]:
        for piece in decode_manifest(engine.objects[name], name).pieces:
            assert blake3(engine.objects[piece.name]).hexdigest() == piece.digest
