"""Another stream takes over an upload or import, or a call cancels it, wherever its stream waits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

import pytest

from coordinator import engine_messages
from coordinator.auth.quotas import QuotaEnforcer
from coordinator.auth.tenant_usage import TenantUsage
from coordinator.handlers import document_tokenizer, ingest
from coordinator.handlers.durable_uploads import DurableUploads
from coordinator.handlers.ingest import Ingest
from coordinator.handlers.transfer.imports import ImportSessions
from coordinator.handlers.uploads import Uploads
from coordinator.text.tokenizer import Tokenizer
from longleaf.errors import Cancelled, NotFound, Unavailable
from longleaf.types import ArchiveChunk, ImportHeader, ImportProgress, IngestHeader, IngestPiece, IngestProgress
from tests.support.archives import packable
from tests.support.fakes.catalog import FakeCatalog
from tests.support.fakes.transfer_engine import FakeTransferEngine
from tests.support.service import FakeEngine, FakeStream, load_tokenizer, write_model
from tests.support.transfer_engines import empty_transfer_engine

pytestmark = pytest.mark.timeout(120)

TEXT = b"Call me Ishmael. Some years ago, never mind how long precisely."
IDS = tuple(range(40))
DOCUMENTS = [pytest.param(TEXT, id="text"), pytest.param(IDS, id="ids")]
HEADER = IngestHeader("moby", upload_id="mine")
MOBY = packable()
ARCHIVE = MOBY.packed()


class SteppedThreads:
    """Stands in for a TokenizerPool: a call waits for one turn of the event loop, and runs during the next two."""

    def submit(self, function: Callable[..., None], *arguments: object) -> "Future[None]":
        loop, future = asyncio.get_running_loop(), Future[None]()

        def begin() -> None:
            if future.set_running_or_notify_cancel():
                loop.call_soon(loop.call_soon, end)

        def end() -> None:
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)

        loop.call_soon(begin)
        return future


class SteppedStream(FakeStream):
    """Waits for a turn of the event loop before each event."""

    async def __anext__(self) -> engine_messages.Event:
        await asyncio.sleep(0)
        return await super().__anext__()


class SteppedEngine(FakeEngine):
    """Creates the context when the stream has ended, unless that has been closed."""

    num_ingests = 0

    def _stream(self, script: Sequence[engine_messages.Event]) -> FakeStream:
        self.num_ingests += 1
        self.streams.append(stream := SteppedStream(script, self.late_error, self.is_endless))
        stream.released.set()
        return stream


class UploadBench:
    """One service, whose ingests wait as often as they can."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.engine, self.charged = SteppedEngine(), 0
        self.engine.is_endless = True
        quotas = QuotaEnforcer(lambda _: TenantUsage())
        quotas.charge_input = self._charge  # type: ignore[method-assign]
        self.catalog = FakeCatalog()
        self.durable = DurableUploads(self.catalog, ())
        self.uploads = Uploads(durable=self.durable)
        threads: Any = SteppedThreads()
        self.ingest = Ingest(self.engine, tokenizer, threads, self.uploads, quotas=quotas)

    def _charge(self, num_tokens: int) -> None:
        self.charged += num_tokens

    async def upload(self, document: bytes | tuple[int, ...]) -> IngestProgress:
        """One stream, which sends the rest after the offset in the first report. Returns the last report."""
        offset = asyncio.get_running_loop().create_future()

        async def pieces() -> AsyncIterator[IngestPiece]:
            yield HEADER
            for start in range(await offset, len(document), 16):
                await asyncio.sleep(0)
                yield document[start : start + 16]

        report = None
        async with aclosing(self.ingest.run(pieces())) as reports:
            async for report in reports:
                if not offset.done():
                    offset.set_result(report.received_bytes or report.received_tokens)
                await asyncio.sleep(0)
        assert report is not None
        return report

    async def check(self, tokenizer: Tokenizer, document: bytes | tuple[int, ...]) -> None:
        """The document has been read once, and only its context remains."""
        report = await self.upload(document)
        assert (report.phase, self.engine.num_ingests) == ("ready", 1)
        encoder = tokenizer.document_encoder(is_first=True)
        if isinstance(document, bytes):
            encoder.push(document.decode())
            encoder.finish()
        expected = encoder.token_ids if isinstance(document, bytes) else document
        assert self.engine.contexts == {"moby": list(expected)}
        assert self.charged == len(expected)
        await self.check_released()

    async def check_released(self) -> None:
        self.uploads.sessions.audit()
        assert self.uploads.sessions.num_bytes == 0
        await self.durable.close()
        assert self.durable.tokens_of("default", ()) == []


@pytest.fixture
def tokenizer(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Documents are read in steps of a few characters or ids, and each step is reported."""
    monkeypatch.setattr(document_tokenizer, "STEP_CHARACTERS", 8)
    for name, value in (("STEP_BYTES", 8), ("STEP_TOKENS", 8), ("REPORT_BYTES", 1), ("REPORT_TOKENS", 1)):
        monkeypatch.setattr(ingest, name, value)
    return load_tokenizer(write_model(tmp_path / "model"))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def started(work: Any, num_turns: int) -> "asyncio.Task[Any]":
    """A task that has run for some turns of the event loop."""
    task = asyncio.create_task(work)
    await turns(num_turns)
    return task


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("gap", [0, 1, 3])
async def test_each_of_three_streams_may_take_over_at_any_await(
    tokenizer: Tokenizer, document: bytes | tuple[int, ...], gap: int
) -> None:
    num_turns = num_replaced = 0
    while True:
        bench = UploadBench(tokenizer)
        first = await started(bench.upload(document), num_turns)
        was_over = first.done()
        second = await started(bench.upload(document), gap)
        outcomes = await asyncio.gather(first, second, bench.upload(document), return_exceptions=True)
        replaced = [outcome for outcome in outcomes if isinstance(outcome, Unavailable)]
        assert all("another stream continued this upload" in str(error) for error in replaced)
        assert {outcome.phase for outcome in outcomes if not isinstance(outcome, Unavailable)} == {"ready"}
        await bench.check(tokenizer, document)
        num_replaced += bool(replaced)
        if was_over:
            assert num_replaced > 30
            return
        num_turns += 1


@pytest.mark.parametrize("document", DOCUMENTS)
async def test_stream_may_break_at_any_await(tokenizer: Tokenizer, document: bytes | tuple[int, ...]) -> None:
    num_turns = 0
    while True:
        bench = UploadBench(tokenizer)
        broken = await started(bench.upload(document), num_turns)
        was_over = broken.done()
        broken.cancel()
        second = await started(bench.upload(document), 1)
        await asyncio.wait([broken, second])
        await bench.check(tokenizer, document)
        if was_over:
            return
        num_turns += 1


@pytest.mark.parametrize("document", DOCUMENTS)
async def test_upload_may_be_cancelled_at_any_await(tokenizer: Tokenizer, document: bytes | tuple[int, ...]) -> None:
    num_turns = num_cancelled = 0
    while True:
        bench = UploadBench(tokenizer)
        stream = await started(bench.upload(document), num_turns)
        was_over = stream.done()
        try:
            await bench.ingest.cancel("moby", "mine")
        except NotFound:  # it has not begun, or has ended
            assert (await stream).phase == "ready"
            await bench.check(tokenizer, document)
        else:
            with pytest.raises(Cancelled, match="the ingest into contexts/moby was cancelled"):
                await stream
            num_cancelled += 1
            assert all(stream.closed.is_set() for stream in bench.engine.streams)
            await bench.check_released()
        if was_over:
            assert num_cancelled > 30
            return
        num_turns += 1


async def test_revoked_work_is_not_counted(tokenizer: Tokenizer) -> None:
    bench, arrives = UploadBench(tokenizer), asyncio.Event()

    async def pieces(*rest: bytes) -> AsyncIterator[IngestPiece]:
        yield HEADER
        for piece in rest:
            yield piece
        arrives.set()
        await asyncio.Event().wait()

    async def read(*rest: bytes) -> None:
        async for _ in bench.ingest.run(pieces(*rest)):
            pass

    old = await started(read(b"x" * 1000), 5)
    assert bench.uploads.sessions.num_bytes >= 1000
    new = asyncio.create_task(read())
    with pytest.raises(Unavailable, match="another stream"):
        await old
    await arrives.wait()
    [upload] = bench.uploads.sessions
    assert bench.uploads.sessions.num_bytes <= upload.num_buffered_bytes < 1000
    new.cancel()
    await asyncio.wait([new])


async def import_archive(imports: ImportSessions) -> ImportProgress:
    """One stream, which sends the rest after the offset in the first report. Returns the last report."""
    offset = asyncio.get_running_loop().create_future()

    async def pieces() -> AsyncIterator[ImportHeader | ArchiveChunk]:
        yield ImportHeader(upload_id="mine", total_bytes=len(ARCHIVE))
        for start in range(await offset, len(ARCHIVE), 500):
            await asyncio.sleep(0)
            yield ArchiveChunk(start, ARCHIVE[start : start + 500])

    report = None
    async with aclosing(imports.run(pieces())) as reports:
        async for report in reports:
            if not offset.done():
                offset.set_result(report.received_bytes)
            await asyncio.sleep(0)
    assert report is not None
    return report


class SteppedTransferEngine(FakeTransferEngine):
    """Storage takes some turns of the event loop."""

    async def answer(self) -> None:
        await turns(3)
        await super().answer()


def stepped_transfer_engine() -> FakeTransferEngine:
    engine = empty_transfer_engine()
    engine.__class__ = SteppedTransferEngine
    return engine


@pytest.mark.parametrize("gap", [0, 1, 4])
async def test_each_of_three_streams_may_take_over_an_import_at_any_await(
    monkeypatch: pytest.MonkeyPatch, gap: int
) -> None:
    async def to_thread(function: Callable[..., Any], *arguments: object) -> Any:
        await turns(3)
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    num_turns = num_replaced = 0
    while True:
        engine = stepped_transfer_engine()
        imports = ImportSessions(engine, 1 << 17, wall_clock=lambda: 10.0)
        first = await started(import_archive(imports), num_turns)
        was_over = first.done()
        second = await started(import_archive(imports), gap)
        outcomes = await asyncio.gather(first, second, import_archive(imports), return_exceptions=True)
        replaced = [outcome for outcome in outcomes if isinstance(outcome, Unavailable)]
        assert all("another stream continued this import" in str(error) for error in replaced)
        assert all(outcome.context is not None for outcome in outcomes if not isinstance(outcome, Unavailable))
        assert (await import_archive(imports)).context is not None
        assert (list(engine.contexts), engine.num_imports, engine.num_cancelled) == (["moby"], 0, 0)
        assert len(engine.objects) == len(MOBY.objects) + len(MOBY.manifests)
        await imports.close()
        num_replaced += bool(replaced)
        if was_over:
            assert num_replaced > 10
            return
        num_turns += 1
