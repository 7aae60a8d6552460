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
from coordinator.handlers.transfer.exports import Exports
from coordinator.handlers.transfer.fakes import FakeTransferEngine
from coordinator.handlers.transfer.imports import KEEP_SECONDS, TRIM_SECONDS, ImportSessions
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
from tests.support.houses import empty_house, house_of, sending
from tests.support.parcels import FORM, Packable, packable, packed_early
from tests.support.service import FakeEngine
from tests.support.timers import Timers

pytestmark = pytest.mark.timeout(60)

VOCABULARY = 1 << 17
NOW = 10.0
MOBY = packable()
WHOLE = MOBY.packed()
Into = Callable[..., ImportSessions]


@pytest.fixture
async def threads() -> AsyncIterator[TokenizerPool]:
    threads = TokenizerPool(1)
    yield threads
    await threads.close()


@pytest.fixture
async def into() -> AsyncIterator[Into]:
    """Makes imports into a house, on clocks that stand still."""
    made = list[ImportSessions]()

    def imports(house: FakeTransferEngine, timers: Timers | None = None, **limits: Any) -> ImportSessions:
        timers = timers or Timers()
        made.append(ImportSessions(house, VOCABULARY, lambda: timers.now, timers, lambda: NOW, **limits))
        return made[-1]

    yield imports
    for one in made:
        await one.close()


@pytest.fixture
def leave(threads: TokenizerPool) -> Callable[..., Any]:
    """Has a context leave a house; its parcel, and the bytes that came."""

    async def run(house: FakeTransferEngine, context: str = "moby", **options: Any) -> tuple[ExportedArchive, bytes]:
        exports = Exports(house, threads, FakeEngine().describe)
        archive, *data = [one async for one in exports.run(ExportContext(context=context, **options))]
        assert isinstance(archive, ExportedArchive)
        assert house.num_open == 0
        return archive, b"".join(one for one in data if isinstance(one, bytes))

    return run


async def arrive(
    imports: ImportSessions, data: bytes, header: ImportHeader | None = None, **cut: int
) -> list[ImportProgress]:
    async with aclosing(imports.run(sending(header or ImportHeader(), data, **cut))) as reports:
        return [report async for report in reports]


async def breaking(imports: ImportSessions, data: bytes, header: ImportHeader, end: int, start: int = 0) -> int:
    """A stream whose client vanishes behind `end` bytes; from where it began to send."""
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


def check_moved(old: Packable, house: FakeTransferEngine, name: str = "moby") -> None:
    """The imported context equals the exported one, with its keys, under segment ids of the new engine only."""
    record, segments, manifests = house.contexts[name]
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
        assert (manifest.service, manifest.segment) == (house.service, f"{house.service}-{now.id}")
        assert manifest.parent == (None if now.parent is None else f"{house.service}-{now.parent}")
        assert [(one.runs, one.digest) for one in manifest.pieces] == [(one.runs, one.digest) for one in was.pieces]
        objects = zip(manifest.objects, was.objects, strict=True)
        assert all(house.objects[name] == old.objects[old_name] for name, old_name in objects)
    assert all(name.startswith(f"services/{house.service}/") for name in house.objects)
    assert house.num_arriving == 0


async def test_a_context_arrives_as_it_left(leave: Any, into: Into) -> None:
    transfers, old = empty_house(), house_of(MOBY)
    archive, data = await leave(old)
    assert (archive.num_bytes, archive.digest, data) == (len(data), (await leave(old))[0].digest, (await leave(old))[1])
    reports = await arrive(into(transfers), data)
    assert (reports[0].received_bytes, reports[-1].received_bytes) == (0, len(data))
    assert reports[-1].context is not None
    assert (reports[-1].context.id, reports[-1].context.state, reports[-1].key_tokens) == ("moby", "parked", 11)
    check_moved(MOBY, transfers)


async def test_what_arrived_leaves_again_as_it_came(leave: Any, into: Into) -> None:
    transfers = empty_house()
    first = (await leave(house_of(MOBY)))[1]
    await arrive(into(transfers), first)
    assert (await leave(transfers))[1] == first


async def test_an_export_goes_on_at_any_byte(leave: Any) -> None:
    archive, data = await leave(house_of(MOBY))
    for offset in range(0, len(data) + 1, 97):
        assert await leave(house_of(MOBY), offset=offset, digest=archive.digest) == (archive, data[offset:])
    with pytest.raises(InvalidArgument, match="offset"):
        await leave(house_of(MOBY), offset=len(data) + 1, digest=archive.digest)


async def test_an_export_does_not_go_on_with_another_context(leave: Any) -> None:
    old = house_of(MOBY)
    archive, _ = await leave(old)
    record = old.contexts["moby"].context
    old.contexts["moby"] = old.contexts["moby"]._replace(context=replace(record, display_name="The Whale"))
    with pytest.raises(FailedPrecondition, match="contexts/moby: it has changed"):
        await leave(old, offset=10, digest=archive.digest)
    assert old.num_open == 0


async def test_what_only_tells_of_use_is_no_change(leave: Any) -> None:
    old = house_of(MOBY)
    archive, _ = await leave(old)
    record = replace(old.contexts["moby"].context, last_used=99.0, num_hits=7)
    old.contexts["moby"] = old.contexts["moby"]._replace(context=record)
    assert (await leave(old))[0] == archive


async def test_exports_raise_what_the_house_raises(leave: Any, threads: TokenizerPool) -> None:
    old = house_of(MOBY)
    with pytest.raises(NotFound):
        await leave(old, "dick")
    old.failures = [StorageUnavailable("away")]
    with pytest.raises(StorageUnavailable):
        await leave(old)
    old.objects.popitem()
    with pytest.raises(DataLoss):
        await leave(old)
    assert old.num_open == 0


async def test_only_so_many_contexts_leave_at_once(threads: TokenizerPool) -> None:
    old = house_of(MOBY)
    exports = Exports(old, threads, FakeEngine().describe, max_exports=1)
    async with aclosing(exports.run(ExportContext(context="moby"))) as first:
        await anext(first)
        with pytest.raises(ResourceExhausted, match="exports"):
            await anext(exports.run(ExportContext(context="moby")))
    assert old.num_open == 0
    await anext(exports.run(ExportContext(context="moby")))


@pytest.mark.parametrize("why", ["left at home", "no storage", "another form"])
async def test_without_keys_the_ids_arrive_alone(leave: Any, into: Into, why: str) -> None:
    transfers = empty_house({"no storage": None, "another form": "int8"}.get(why, FORM))
    _, data = await leave(house_of(MOBY), with_keys=why != "left at home")
    reports = await arrive(into(transfers), data)
    assert reports[-1].key_tokens == 0
    record, segments, manifests = transfers.contexts["moby"]
    assert (manifests, transfers.objects) == ({}, {})
    assert [one.token_ids for one in segments] == [MOBY.path[0].token_ids[:6], MOBY.path[1].token_ids]
    assert (record.num_tokens, segments[1].start, segments[1].parent) == (11, 6, segments[0].id)


async def test_the_keys_of_some_segments_arrive(into: Into) -> None:
    transfers, given = empty_house(), packable(((8, 8), (5, 5), (4, 4)), (True, False, True))
    reports = await arrive(into(transfers), given.packed())
    assert reports[-1].key_tokens == 12
    assert len(transfers.contexts["moby"].manifests) == 2


async def test_what_early_versions_sent_arrives_with_segments_used_in_part(into: Into) -> None:
    transfers, given = empty_house(), packable(((8, 6), (5, 5)))
    *_, last = await arrive(into(transfers), packed_early(given))
    assert last.context is not None
    assert (last.context.tokens, last.key_tokens) == (11, 11)


async def test_another_name_is_taken(into: Into) -> None:
    transfers = empty_house()
    await arrive(into(transfers), WHOLE, ImportHeader(context="dick"))
    check_moved(MOBY, transfers, "dick")


# --- faults ---


async def refused(
    imports: ImportSessions, house: FakeTransferEngine, data: bytes, error: type[LongleafError], told: str
) -> None:
    for upload_id in ("", "one"):
        with pytest.raises(error, match=told):
            await arrive(imports, data, ImportHeader(upload_id=upload_id))
        await imports.close()
        assert (house.contexts, house.objects, house.num_arriving) == ({}, {}, 0)


async def test_a_parcel_that_is_cut_leaves_nothing(into: Into) -> None:
    transfers = empty_house()
    imports = into(transfers)
    for end in range(0, len(WHOLE), 31):
        await refused(imports, transfers, WHOLE[:end], InvalidArgument, "parcel: it is truncated")


async def test_a_parcel_that_is_damaged_leaves_nothing(into: Into) -> None:
    transfers = empty_house()
    imports = into(transfers)
    for place in range(0, len(WHOLE), 13):
        damaged = WHOLE[:place] + bytes([WHOLE[place] ^ 1]) + WHOLE[place + 1 :]
        await refused(imports, transfers, damaged, InvalidArgument, "parcel: ")


async def test_another_model_is_told_by_what_differs(into: Into) -> None:
    transfers = empty_house()
    other = Fingerprint("cd" * 32, {"config.json": "01", "model.safetensors": "03", "tokenizer.json": "04"})
    given = packable()
    given.head = replace(given.head, fingerprint=other)
    message = r"'fake' has fingerprint cdcdcdcdcdcdcdcd; .* has abababababababab; .* tokenizer.json, model.safetensors$"
    await refused(into(transfers), transfers, given.packed(), CheckpointChanged, message)


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
async def test_heads_that_cannot_be_taken_in_are_told(into: Into, changes: dict[str, Any], message: str) -> None:
    transfers, given = empty_house(), packable()
    given.head = replace(given.head, **changes)
    await refused(into(transfers), transfers, given.packed(), InvalidArgument, message)


async def test_a_token_id_that_the_model_has_not_is_told(into: Into) -> None:
    transfers, given = empty_house(), packable(keyed=(False, False))
    given.path[1].token_ids[4] = VOCABULARY
    await refused(
        into(transfers), transfers, given.packed(), InvalidArgument, "a token id outside the vocabulary of 131,072"
    )


async def test_pieces_that_do_not_hold_their_segment_are_told(into: Into) -> None:
    transfers, given = empty_house(), packable()
    number, manifest = next(iter(given.manifests.items()))
    given.manifests[number] = replace(manifest, pieces=manifest.pieces[1:])
    await refused(into(transfers), transfers, given.packed(), InvalidArgument, "the pieces of a segment are invalid")


@pytest.mark.parametrize("cut", [1, 3, 5])
async def test_pieces_that_end_within_a_block_are_refused(into: Into, cut: int) -> None:
    transfers, given = empty_house(), packable()
    number, manifest = next(iter(given.manifests.items()))
    (first, second), end = manifest.pieces, manifest.end
    pieces = (replace(first, runs=((0, cut),)), replace(second, runs=((cut, end),)))
    given.manifests[number] = replace(manifest, pieces=pieces)
    message = "the pieces of a segment are invalid: pieces: .* blocks of 4"
    await refused(into(transfers), transfers, given.packed(), InvalidArgument, message)


async def test_windows_before_their_segment_are_refused(into: Into) -> None:
    transfers, given = empty_house(), packable()
    number, manifest = list(given.manifests.items())[1]
    assert manifest.windows is not None
    windows = replace(manifest.windows, runs=((manifest.start - 1, manifest.end),))
    given.manifests[number] = replace(manifest, windows=windows)
    message = "the pieces of a segment are invalid: windows: "
    await refused(into(transfers), transfers, given.packed(), InvalidArgument, message)


async def test_what_an_archive_says_is_decoded_and_checked_off_the_event_loop_and_counted(
    into: Into, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers, header = empty_house(), ImportHeader(upload_id="one")
    imports, threads, kinds = into(transfers), list[int](), list[str]()

    def note(kind: str, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.get_ident())
            kinds.append(kind)
            return call(*args, **kwargs)

        return noted

    monkeypatch.setattr(reader, "decode", note("head", reader.decode))
    monkeypatch.setattr(reader, "decode_segment", note("segment", reader.decode_segment))
    monkeypatch.setattr(SegmentManifest, "check", note("manifest", SegmentManifest.check))
    await breaking(imports, WHOLE, header, len(WHOLE) - 50)
    assert kinds == ["head", *["segment", "manifest"] * 2]
    assert threading.get_ident() not in threads
    (retained,) = imports._all
    num_described = SEGMENT_BYTES * 2 + PIECE_BYTES * 6 + RUN_BYTES * 6
    assert retained.arrival.num_held_bytes >= num_described + 2 * 4 * 11


async def test_a_house_that_keeps_nothing_says_so(into: Into) -> None:
    transfers = empty_house()
    transfers.is_durable = False
    await refused(into(transfers), transfers, WHOLE, FailedPrecondition, "--data-dir")


async def test_a_name_that_is_taken_is_told_before_the_rest_is_sent(into: Into) -> None:
    transfers = house_of(packable(seed=9))
    with pytest.raises(AlreadyExists, match="contexts/moby"):
        await arrive(into(transfers), WHOLE, end=600, size=600)


async def test_a_name_that_is_taken_meanwhile_is_told(into: Into) -> None:
    transfers = empty_house()
    imports = into(transfers)
    header = ImportHeader(upload_id="one")
    await breaking(imports, WHOLE, header, len(WHOLE) - 50)
    transfers.contexts |= house_of(packable(seed=9)).contexts
    with pytest.raises(AlreadyExists, match="contexts/moby"):
        await arrive(imports, WHOLE, header, start=len(WHOLE) - 50)
    await imports.close()
    assert (transfers.objects, transfers.num_arriving) == ({}, 0)


async def test_wrong_sequences_of_requests_are_told(into: Into) -> None:
    imports = into(empty_house())
    with pytest.raises(InvalidArgument, match="config: must be in the first"):
        [report async for report in imports.run(sending(None, WHOLE))]

    async def twice() -> AsyncIterator[Any]:
        yield ImportHeader()
        yield ImportHeader()

    with pytest.raises(InvalidArgument, match="config: must be in the first"):
        [report async for report in imports.run(twice())]
    with pytest.raises(InvalidArgument, match=r"piece.offset: is 100, but 0 bytes have been received"):
        await arrive(imports, WHOLE, start=100)
    with pytest.raises(InvalidArgument, match=r"config.total_size_bytes: more than 500 bytes"):
        await arrive(imports, WHOLE, ImportHeader(total_bytes=500))


# --- streams that break ---


async def test_an_import_goes_on_at_the_next_byte_wherever_it_broke(into: Into) -> None:
    for end in range(0, len(WHOLE), 61):
        transfers = empty_house()
        imports, header = into(transfers), ImportHeader(upload_id="one", total_bytes=len(WHOLE))
        await breaking(imports, WHOLE, header, end)
        reports = await arrive(imports, WHOLE, header, start=end)
        assert reports[0].received_bytes == end
        check_moved(MOBY, transfers)


async def test_bytes_that_came_before_are_passed_over(into: Into) -> None:
    transfers, header = empty_house(), ImportHeader(upload_id="one")
    imports = into(transfers)
    await breaking(imports, WHOLE, header, 700)
    assert await breaking(imports, WHOLE, header, 900, start=300) == 700
    assert (await arrive(imports, WHOLE, header))[0].received_bytes == 900
    check_moved(MOBY, transfers)


async def test_without_an_upload_id_a_stream_that_breaks_leaves_nothing(into: Into) -> None:
    transfers = empty_house()
    imports = into(transfers)
    await breaking(imports, WHOLE, ImportHeader(), 1000)
    await imports.close()
    assert (transfers.objects, transfers.num_arriving) == ({}, 0)


async def test_an_import_that_is_done_is_answered_again(into: Into) -> None:
    transfers, header = empty_house(), ImportHeader(upload_id="one")
    imports = into(transfers)
    first = await arrive(imports, WHOLE, header)
    assert await arrive(imports, b"", header) == first[-1:]
    later = await arrive(into(transfers), WHOLE, header)  # as after a restart
    assert (later[-1].context, later[-1].key_tokens) == (first[-1].context, None)
    assert later[-1].received_bytes < len(WHOLE)
    transfers.contexts.clear()
    assert (await arrive(imports, WHOLE, header))[0].received_bytes == 0
    check_moved(MOBY, transfers)


@pytest.mark.parametrize("num_calls", range(9))
async def test_a_storage_that_is_away_for_a_while_loses_nothing(into: Into, num_calls: int) -> None:
    transfers, header = empty_house(), ImportHeader(upload_id="one")
    imports, at = into(transfers), 0
    answer, left = transfers.answer, [num_calls]

    async def failing() -> None:
        left[0] -= 1
        if left[0] == -1:
            raise StorageUnavailable("away")
        await answer()

    transfers.answer = failing  # type: ignore[method-assign]
    with pytest.raises(StorageUnavailable):
        await arrive(imports, WHOLE, header)
    reports = await arrive(imports, WHOLE, header, start=at)
    assert reports[-1].context is not None
    check_moved(MOBY, transfers)


async def test_a_client_that_vanishes_while_a_piece_is_written_can_go_on(into: Into) -> None:
    transfers, header = empty_house(), ImportHeader(upload_id="one")
    imports = into(transfers)
    transfers.is_answering.clear()
    first = asyncio.create_task(arrive(imports, WHOLE, header))
    await transfers.is_asked.wait()
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    second = asyncio.create_task(arrive(imports, WHOLE, header))
    await asyncio.sleep(0)
    transfers.is_answering.set()
    assert (await second)[0].received_bytes > 0
    assert transfers.num_cancelled == 0
    check_moved(MOBY, transfers)


async def test_a_client_that_vanishes_while_its_context_is_kept_finds_it(into: Into) -> None:
    transfers, header = empty_house(), ImportHeader(upload_id="one")
    imports = into(transfers)
    await breaking(imports, WHOLE, header, len(WHOLE))
    transfers.is_asked.clear()
    transfers.is_answering.clear()
    first = asyncio.create_task(arrive(imports, b"", header))
    await transfers.is_asked.wait()
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    transfers.is_answering.set()
    assert (await arrive(imports, b"", header))[-1].context is not None
    assert transfers.num_cancelled == 0
    check_moved(MOBY, transfers)


async def test_the_newest_stream_goes_on(into: Into) -> None:
    transfers, header = empty_house(), ImportHeader(upload_id="one")
    imports, more = into(transfers), asyncio.Event()

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
    await arrive(imports, WHOLE, header)
    more.set()
    with pytest.raises(Unavailable, match="another stream"):
        await old
    check_moved(MOBY, transfers)


async def test_a_silent_client_is_let_go_and_can_come_back(into: Into) -> None:
    transfers, header = empty_house(), ImportHeader(upload_id="one")
    imports = into(transfers, idle_seconds=0.01)

    async def silent() -> AsyncIterator[Any]:
        async for piece in sending(header, WHOLE, end=500):
            yield piece
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match="sent nothing"):
        [report async for report in imports.run(silent())]
    assert (await arrive(imports, WHOLE, header))[0].received_bytes == 500
    check_moved(MOBY, transfers)


async def test_who_does_not_come_back_leaves_nothing(into: Into) -> None:
    transfers, timers = empty_house(), Timers()
    imports, header = into(transfers, timers), ImportHeader(upload_id="one")
    await breaking(imports, WHOLE, header, 1000)
    timers.advance(KEEP_SECONDS - TRIM_SECONDS)
    assert (len(transfers.objects) > 0, transfers.num_arriving) == (True, 1)
    timers.advance(TRIM_SECONDS)
    timers.advance(TRIM_SECONDS)
    await imports.close()
    assert (transfers.objects, transfers.num_arriving) == ({}, 0)
    assert await breaking(imports, WHOLE, header, 100) == 0


async def test_only_so_many_contexts_arrive_at_once(into: Into) -> None:
    transfers = empty_house()
    imports = into(transfers, max_imports=2)
    headers = [ImportHeader(context=f"moby-{number}", upload_id="one") for number in range(4)]
    for header in headers[:3]:  # exports without a reader are evicted
        await breaking(imports, WHOLE, header, 1000)
    assert [await breaking(imports, WHOLE, header, 0) for header in headers[2:0:-1]] == [1000, 1000]
    open_streams = [imports.run(sending(header, WHOLE)) for header in headers[:3]]
    await anext(open_streams[0])
    await anext(open_streams[1])
    with pytest.raises(ResourceExhausted, match="imports: 2 are running"):
        await anext(open_streams[2])
    for stream in open_streams:
        await stream.aclose()


async def test_contexts_that_arrive_together_keep_to_the_quota(into: Into) -> None:
    CALLER.set(Caller(tenant="acme", quotas=Quotas(contexts=1)))
    transfers = empty_house()
    imports = into(transfers, ledger=QuotaEnforcer(lambda _: TenantUsage(contexts=len(transfers.contexts))))
    transfers.is_answering.clear()
    coming = [asyncio.create_task(arrive(imports, WHOLE, ImportHeader(context=name))) for name in ("a", "b")]
    for _ in range(100):
        await asyncio.sleep(0)
    transfers.is_answering.set()
    reported = await asyncio.gather(*coming, return_exceptions=True)
    assert sorted(isinstance(each, ResourceExhausted) for each in reported) == [False, True]
    assert len(transfers.contexts) == 1


async def test_a_tenant_leaves_room_for_the_contexts_of_others(into: Into) -> None:
    imports = into(empty_house(), max_imports=4, tenant_share=1 / 2)
    acme, bolt = (
        [ImportHeader(context=f"{tenant}/{number}", upload_id="one", tenant=tenant) for number in range(3)]
        for tenant in ("acme", "bolt")
    )
    for header in (*bolt[:1], *acme):
        await breaking(imports, WHOLE, header, 1000)
    assert await breaking(imports, WHOLE, bolt[0], 1000) == 1000, "acme's own gave way"
    assert await breaking(imports, WHOLE, acme[0], 1000) == 0
    open_streams = [imports.run(sending(header, WHOLE)) for header in acme]
    for stream in open_streams[:2]:
        await anext(stream)
    with pytest.raises(ResourceExhausted, match="2 of tenant acme are running; the limit is 2"):
        await anext(open_streams[2])
    for stream in open_streams:
        await stream.aclose()


async def test_a_tenant_leaves_room_for_exports_of_others(threads: TokenizerPool) -> None:
    old = house_of(*(packable(name=name) for name in ("acme/a", "acme/b", "bolt/a")))
    exports = Exports(old, threads, FakeEngine().describe, max_exports=2, tenant_share=1 / 2)
    async with aclosing(exports.run(ExportContext(context="acme/a"))) as first:
        await anext(first)
        with pytest.raises(ResourceExhausted, match="1 of tenant acme are running"):
            await anext(exports.run(ExportContext(context="acme/b")))
        async with aclosing(exports.run(ExportContext(context="bolt/a"))) as other:
            await anext(other)
    async with aclosing(exports.run(ExportContext(context="acme/b"))) as last:
        await anext(last)


async def test_no_more_memory_is_held_than_there_may_be(into: Into) -> None:
    given = packable(piece_bytes=3000)
    whole, transfers = given.packed(), empty_house()
    described = 2 * SEGMENT_BYTES + 6 * (PIECE_BYTES + RUN_BYTES) + 8 * 11 + 300
    imports = into(transfers, max_bytes=described + 4000)
    await breaking(imports, whole, ImportHeader(context="a", upload_id="one"), 3500)  # holds most of a piece
    assert len(await arrive(imports, whole, ImportHeader(context="b"))) > 1  # the oldest import is evicted
    imports = into(transfers, max_bytes=(most := 4000))
    with pytest.raises(ResourceExhausted, match=f"imports: all imports use too much memory; the limit is {most:,}"):
        await arrive(imports, whole, ImportHeader(context="c"))
    assert await breaking(into(transfers), whole, ImportHeader(context="a", upload_id="one"), 0) == 0


async def test_manifests_come_last(into: Into) -> None:
    transfers = empty_house()
    names, answer = list[str](), transfers.objects

    class Noting(dict[str, bytes]):
        def __setitem__(self, name: str, content: bytes) -> None:
            names.append(name)
            super().__setitem__(name, content)

    transfers.objects = Noting(answer)
    await arrive(into(transfers), WHOLE)
    assert [name.endswith("/manifest") for name in names] == [False] * (len(names) - 2) + [True] * 2
    for name in names[-2:]:
        for piece in decode_manifest(transfers.objects[name], name).pieces:
            assert blake3(transfers.objects[piece.name]).hexdigest() == piece.digest
