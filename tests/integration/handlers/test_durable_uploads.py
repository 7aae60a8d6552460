"""Documents whose upload starts at one service and continues at its successor."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.auth.caller import CALLER, Caller
from coordinator.auth.quotas import UNLIMITED, QuotaEnforcer
from coordinator.auth.tenant_usage import TenantUsage
from coordinator.handlers.document_tokenizer import DocumentTokenizer
from coordinator.handlers.durable_uploads import KEEP_SECONDS, DurableUploads
from coordinator.handlers.ingest import Ingest
from coordinator.handlers.uploads import Uploads
from coordinator.persistence.catalog.catalog import NO_STARTS, Catalog
from coordinator.persistence.catalog.records import Change, UploadKey, UploadRecord
from coordinator.text.encoder import StablePrefix
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.credentials import Quotas
from longleaf.document_text import TextFile
from longleaf.errors import InvalidArgument, NotFound, ResourceExhausted, StorageUnavailable
from longleaf.types import ContextSettings, IngestHeader, IngestPiece, IngestProgress
from tests.support.coming import comes
from tests.support.fakes.catalog import FakeCatalog
from tests.support.service import FakeEngine, load_tokenizer, write_model

HEADER = IngestHeader("moby", upload_id="mine", settings=ContextSettings(display_name="Moby-Dick"))
TEXT = ("Call me Ishmael. Some years ago, never mind how long precisely. \U0001f433 " * 6_000).encode()


class UploadService:
    """The ingests of one service over a catalog."""

    def __init__(self, folder: Path, catalog: Catalog, records: Sequence[Any], date: float) -> None:
        self.engine = FakeEngine()
        self.engine.max_positions = self.engine.total_tokens = 1 << 23
        self.threads = TokenizerPool()
        self.catalog = catalog
        self.durable = DurableUploads(catalog, records, lambda: date)
        self._tokenizer = load_tokenizer(write_model(folder / "model"))
        self.quotas = UNLIMITED
        self.ingest = self.ingest_with(self.durable)

    def ingest_with(self, durable: DurableUploads) -> Ingest:
        """Ingests with a service that has no document in memory."""
        self.uploads = Uploads(durable=durable)
        return Ingest(self.engine, self._tokenizer, self.threads, self.uploads, quotas=self.quotas)

    def use_quotas(self) -> None:
        """Sets the quotas of the caller."""
        self.quotas = QuotaEnforcer(
            lambda _: TenantUsage(),
            lambda: 0.0,
            num_uploads=lambda tenant: self.uploads.num_of(tenant),
            num_upload_tokens=lambda tenant: self.uploads.num_tokens_of(tenant),
        )
        self.ingest = self.ingest_with(self.durable)

    async def run(self, *pieces: IngestPiece, ends: bool = True) -> list[IngestProgress]:
        reports: list[IngestProgress] = []
        sent = asyncio.Event()

        async def stream() -> AsyncIterator[IngestPiece]:
            for piece in pieces:
                yield piece
            sent.set()
            if not ends:
                await asyncio.get_running_loop().create_future()

        async def read() -> None:
            async for report in self.ingest.run(stream()):
                reports.append(report)  # noqa: PERF401 - reports before the interruption count

        task = asyncio.create_task(read())
        await asyncio.wait([task] if ends else [task, asyncio.create_task(sent.wait())], return_when="FIRST_COMPLETED")
        if not ends:
            task.cancel()
            await asyncio.wait([task])
        else:
            task.result()
        return reports


@asynccontextmanager
async def serving(folder: Path, date: float = 5.0) -> AsyncIterator[UploadService]:
    """The ingests of a service for the block; only the catalog survives it."""
    catalog = await Catalog.open(folder / "catalog.db")
    found = UploadService(folder, catalog, (await catalog.load()).uploads, date)
    yield found
    await found.durable.close()
    await found.threads.close()
    await catalog.close()


def cut(data: bytes, size: int = 1 << 16) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


async def whole(folder: Path, pieces: Sequence[IngestPiece]) -> list[int]:
    """The context of an uninterrupted upload."""
    async with serving(folder) as one:
        await one.run(IngestHeader("moby"), *pieces)
        return one.engine.contexts["moby"]


async def test_text_resumes_at_the_first_unsettled_byte(tmp_path: Path) -> None:
    expected = await whole(tmp_path, cut(TEXT))
    offsets = [0]
    while offsets[-1] < len(TEXT) * 0.7:
        async with serving(tmp_path) as one:
            sent = TEXT[offsets[-1] : offsets[-1] + 150_001]
            await one.run(HEADER, *cut(sent), ends=False)
        async with serving(tmp_path) as one:
            (first, *_) = await one.run(HEADER, ends=False)
            assert offsets[-1] < first.received_bytes <= offsets[-1] + len(sent)
            offsets.append(first.received_bytes)
    async with serving(tmp_path) as one:
        one.engine.contexts["moby"] = [1]
        with pytest.raises(InvalidArgument, match=r"config\.append"):
            await one.run(IngestHeader("moby", upload_id="mine", append=True), b"x")
        del one.engine.contexts["moby"]
        reports = await one.run(HEADER, *cut(TEXT[offsets[-1] :]))
        assert reports[-1].phase == "ready"
        assert one.engine.contexts["moby"] == expected
    async with serving(tmp_path) as one:
        assert (await one.run(HEADER, b"other", ends=False))[0].received_bytes == 0, "nothing is left of it"


async def test_ids_resume_after_the_last_received(tmp_path: Path) -> None:
    ids = [i % 200 for i in range(200_000)]
    async with serving(tmp_path) as one:
        await one.run(HEADER, tuple(ids[:150_000]), ends=False)
    async with serving(tmp_path) as one:
        (first, *_) = await one.run(HEADER, ends=False)
        assert 0 < first.received_tokens <= 150_000
        await one.run(HEADER, tuple(ids[first.received_tokens :]))
        assert one.engine.contexts["moby"] == ids


class Failing:
    """A catalog that cannot save the second part of an upload."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.num_calls = 0

    async def append_upload(
        self, record: UploadRecord, start: int, new_ids: "array[int]", new_starts: "array[int]" = NO_STARTS
    ) -> None:
        self.num_calls += 1
        if self.num_calls == 2:
            raise StorageUnavailable("the disk is full")
        await self._catalog.append_upload(record, start, new_ids, new_starts)

    async def upload_ids(self, key: UploadKey) -> "array[int]":
        return await self._catalog.upload_ids(key)

    async def upload_starts(self, key: UploadKey) -> "array[int]":
        return await self._catalog.upload_starts(key)

    async def drop_upload(self, key: UploadKey) -> None:
        await self._catalog.drop_upload(key)


@pytest.mark.parametrize("is_another_service", [False, True])
async def test_unsaved_parts_are_sent_again(tmp_path: Path, is_another_service: bool) -> None:
    """Pieces are sent again even if later pieces were saved, or if the service that had them in memory has dropped
    them."""
    expected = await whole(tmp_path, cut(TEXT))
    async with serving(tmp_path) as one:
        one.durable = DurableUploads(failing := Failing(one.catalog), ())
        one.ingest = one.ingest_with(one.durable)
        await one.run(HEADER, *cut(TEXT[:400_000]), ends=False)
        assert failing.num_calls > 1
        await one.durable.close()
        if not is_another_service:
            one.ingest = one.ingest_with(one.durable)
            await goes_on(one, expected)
    if is_another_service:
        async with serving(tmp_path) as one:
            await goes_on(one, expected)


async def goes_on(one: UploadService, expected: list[int]) -> None:
    """Sends the document from the offset that the service reports."""
    (first, *_) = await one.run(HEADER, ends=False)
    assert 0 < first.received_bytes < 300_000
    reports = await one.run(HEADER, *cut(TEXT[first.received_bytes :]))
    assert reports[-1].phase == "ready"
    assert one.engine.contexts["moby"] == expected


async def test_abandoned_uploads_are_dropped_after_the_retention_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as one:
        await one.run(HEADER, *cut(TEXT[:200_000]), ends=False)
    async with serving(tmp_path, 5.0 + KEEP_SECONDS) as one:
        one.durable.begin()
        await asyncio.sleep(0)
        assert (await one.run(HEADER, ends=False))[0].received_bytes > 0
    async with serving(tmp_path, 6.0 + KEEP_SECONDS) as one:
        one.durable.begin()
        await asyncio.sleep(0)
        assert (await one.run(HEADER, ends=False))[0].received_bytes == 0


async def test_upload_of_a_previous_service_can_be_cancelled(tmp_path: Path) -> None:
    async with serving(tmp_path) as one:
        await one.run(HEADER, *cut(TEXT[:150_001]), ends=False)
    async with serving(tmp_path) as one:
        await one.ingest.cancel("moby", "mine")
        with pytest.raises(NotFound):
            await one.ingest.cancel("moby", "mine")
    async with serving(tmp_path) as one:
        assert (await one.run(HEADER, ends=False))[0].received_bytes == 0


async def test_finished_ingest_is_not_prefilled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as one:
        one.engine.contexts["moby"] = [1, 2, 3]
        monkeypatch.setattr(one.engine, "last_upload_id", lambda _: "mine")
        for append in (False, True):
            (report,) = await one.run(IngestHeader("moby", upload_id="mine", append=append), b"x", ends=False)
            assert report.phase == "ready"
            assert report.context == one.engine.get_context("moby")
        assert one.engine.contexts["moby"] == [1, 2, 3]


async def test_concurrent_uploads_stay_within_the_quota(tmp_path: Path) -> None:
    CALLER.set(Caller(tenant="acme", quotas=Quotas(uploads=2)))
    headers = [IngestHeader(f"acme/{number}", tenant="acme", upload_id="mine") for number in range(6)]
    async with serving(tmp_path) as one:
        for each in headers:
            await one.run(each, array("I", range(5)), ends=False)
    async with serving(tmp_path) as one:  # each must be looked up first
        one.use_quotas()
        reported = await asyncio.gather(*(one.run(each, array("I", [5]), ends=False) for each in headers))
        assert [bool(reports) for reports in reported].count(True) == 2


async def test_upload_to_a_deleted_context_is_not_reported_as_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pieces that still arrive are dropped and are not saved."""
    catalog = await Catalog.open(tmp_path / "catalog.db")
    retained = DurableUploads(catalog, ())
    record = UploadRecord(context="moby", upload_id="mine", header=b"x", settled_bytes=5, updated=1.0)
    for start in (0, 5, 10):
        retained._num_stored.setdefault(record.key, start + 5)
        await retained._append(record, start, array("I", range(5)), NO_STARTS)
        await catalog.commit(Change(dropped_contexts=("moby",)))
    assert caplog.text == ""
    assert (await catalog.load()).uploads == ()
    await catalog.close()


def acme(number: int) -> IngestHeader:
    return IngestHeader(f"acme/{number}", tenant="acme", upload_id="mine")


async def test_interrupted_uploads_count_against_the_quota_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as one:
        for number in range(2):
            await one.run(acme(number), array("I", range(5)), ends=False)
    CALLER.set(Caller(tenant="acme", quotas=Quotas(uploads=2)))
    async with serving(tmp_path) as one:
        one.use_quotas()
        with pytest.raises(ResourceExhausted, match="quotas/uploads"):
            await one.run(acme(2), array("I", [5]))
        await one.run(acme(0), array("I", [5]))
        assert one.engine.contexts["acme/0"] == [*range(5), 5]
        one.durable.forget(acme(1))
        await one.run(acme(2), array("I", [5]))


async def test_tokens_of_interrupted_uploads_count_against_the_quota(tmp_path: Path) -> None:
    CALLER.set(Caller(tenant="acme", quotas=Quotas(tokens=12)))
    async with serving(tmp_path) as one:
        one.use_quotas()
        await one.run(acme(0), array("I", range(5)), ends=False)
    async with serving(tmp_path) as one:
        one.use_quotas()
        with pytest.raises(ResourceExhausted, match="quotas/tokens"):  # during the upload, not at its end
            await one.run(acme(1), array("I", range(8)), *[array("I", [])] * 3)
        assert one.uploads.num_tokens_of("acme") == 13
        with pytest.raises(ResourceExhausted, match="have 13 tokens"):
            await one.run(acme(2), array("I", [5]))
        await one.ingest.cancel("acme/1", "mine")
        await one.run(acme(0), array("I", range(5, 12)))
        assert one.engine.contexts["acme/0"] == [*range(12)]


async def test_tokens_count_as_they_arrive(tmp_path: Path) -> None:
    CALLER.set(Caller(tenant="acme", quotas=Quotas(tokens_in_per_minute=4)))
    async with serving(tmp_path) as one:
        one.use_quotas()
        await one.run(acme(0), array("I", range(5)), ends=False)
        with pytest.raises(ResourceExhausted, match="quotas/tokens_in_per_minute"):
            await one.run(acme(1), array("I", [5]))


async def test_text_format_of_a_running_upload_is_persisted(tmp_path: Path) -> None:
    async with serving(tmp_path) as one:
        await one.run(IngestHeader("moby"), *cut(TEXT))
        expected = one.engine.texts["moby"]
    assert expected is not None and expected.num_bytes == len(TEXT)
    sent = 0
    for _ in range(2):
        async with serving(tmp_path) as one:
            (first, *_) = await one.run(HEADER, *cut(TEXT[sent : sent + 150_001]), ends=False)
            sent = first.received_bytes
    async with serving(tmp_path) as one:
        (first, *_) = await one.run(HEADER, ends=False)
        assert first.received_bytes > sent
        sent = first.received_bytes
    async with serving(tmp_path) as one:
        await one.run(HEADER, *cut(TEXT[sent:]))
        assert one.engine.texts["moby"] == expected


async def test_files_of_an_upload_do_not_change(tmp_path: Path) -> None:
    files = (TextFile("a.txt", 0), TextFile("b.txt", 1000))
    async with serving(tmp_path) as one:
        await one.run(replace(HEADER, files=files), *cut(TEXT[:200_000]), ends=False)
    async with serving(tmp_path) as one:
        with pytest.raises(InvalidArgument, match=r"config\.files: differ from those at the start of this upload"):
            await one.run(replace(HEADER, files=files[:1]))
    async with serving(tmp_path) as one:
        (first, *_) = await one.run(replace(HEADER, files=files), ends=False)
        assert first.received_bytes > 0


class Arrived:
    """A document with this number of tokens."""

    stable = StablePrefix(0, 0)
    starts = array("Q")

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    @property
    def token_ids(self) -> "array[int]":
        return array("I", range(self.num_tokens))


@pytest.mark.timeout(60)
async def test_cancelled_call_affects_no_other_call() -> None:
    catalog = FakeCatalog()
    retained = DurableUploads(catalog, (), lambda: 5.0)
    catalog.hold()
    retained.persist(acme(1), Arrived(100))  # type: ignore[arg-type]
    asking = asyncio.create_task(retained.load(acme(1), Arrived(0)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    other = asyncio.create_task(retained.load(acme(2), Arrived(0)))  # type: ignore[arg-type]
    await other  # writes for other uploads do not delay it
    catalog.release()
    await comes(lambda: retained.has(acme(1)))
    assert retained.tokens_of("acme", ()) == [100]
    await retained.close()


@pytest.mark.timeout(60)
async def test_upload_dropped_as_expired_can_restart() -> None:
    now = [0.0]
    retained = DurableUploads(FakeCatalog(), (), lambda: now[0])
    retained.persist(acme(1), Arrived(100))  # type: ignore[arg-type]
    await comes(lambda: retained.has(acme(1)))
    now[0] = KEEP_SECONDS + 1
    retained.drop_old()
    await retained.load(acme(1), Arrived(0))  # type: ignore[arg-type]
    retained.persist(acme(1), Arrived(50))  # type: ignore[arg-type]
    await comes(lambda: retained.has(acme(1)))
    assert retained.tokens_of("acme", ()) == [50]
    await retained.close()


async def test_tokens_of_work_left_by_a_stream_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(QuotaEnforcer, "charge_input", lambda _, num_tokens: taken.append(num_tokens))
    async with serving(tmp_path) as one:
        one.use_quotas()
        digest = DocumentTokenizer.digest
        with monkeypatch.context() as patch:
            exporting: list[Callable[[], object]] = []
            loop = asyncio.get_running_loop()

            def leave(tokenizer: DocumentTokenizer) -> None:
                loop.call_soon_threadsafe(exporting[0])
                digest(tokenizer)

            patch.setattr(DocumentTokenizer, "digest", leave)

            async def read() -> None:
                async for _ in one.ingest.run(sending(HEADER, TEXT[: 1 << 17])):
                    pass

            reading = asyncio.create_task(read())
            exporting.append(reading.cancel)
            await asyncio.wait([reading])
        await one.run(HEADER, ends=False)
        (upload,) = one.uploads.sessions
        assert upload.document is not None
        assert sum(taken) == upload.document.num_tokens > 0


async def sending(*pieces: IngestPiece) -> AsyncIterator[IngestPiece]:
    for piece in pieces:
        yield piece
    await asyncio.get_running_loop().create_future()
