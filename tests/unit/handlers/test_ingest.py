"""Ingests with a silent client, a truncated document or an expired context, and ingests beyond the available space."""

import asyncio
import weakref
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from coordinator import engine_messages
from coordinator.auth.caller import CALLER, OWNER, Caller
from coordinator.auth.quotas import UNLIMITED, QuotaEnforcer
from coordinator.auth.tenant_usage import TenantUsage
from coordinator.grpc_server.servicers import _pieces
from coordinator.handlers.document_tokenizer import DocumentTokenizer
from coordinator.handlers.ingest import Ingest
from coordinator.handlers.uploads import Uploads
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.credentials import Quotas
from longleaf.errors import (
    CheckpointChanged,
    ContextLost,
    DeadlineExceeded,
    InvalidArgument,
    LongleafError,
    NotFound,
    ResourceExhausted,
)
from longleaf.types import ContextSettings, IngestHeader, IngestPiece, IngestProgress, Progress, Recovering
from longleaf.v1 import context_service_pb2 as ingest_pb
from tests.support.service import FakeEngine, load_tokenizer, write_model

pytestmark = pytest.mark.timeout(60)
SILENCE = 0.05


class IngestBench:
    """The ingests of an engine, and their uploads."""

    def __init__(self, folder: Path, idle_seconds: float, quotas: QuotaEnforcer = UNLIMITED, **limits: int) -> None:
        self.engine, self.threads = FakeEngine(), TokenizerPool()
        self.engine.max_positions = 1 << 20
        self.uploads = Uploads(**limits)
        self.date = 1000.0
        tokenizer = load_tokenizer(write_model(folder))
        self.ingest = Ingest(
            self.engine, tokenizer, self.threads, self.uploads, lambda: self.date, idle_seconds, quotas
        )

    async def run(self, *pieces: IngestPiece, ends: bool = True) -> list[IngestProgress]:
        """The reports for these pieces, after which the stream ends or stays open without messages."""
        async with aclosing(self.ingest.run(stream(*pieces, ends=ends))) as reports:
            return [report async for report in reports]


async def stream(*pieces: IngestPiece, ends: bool) -> AsyncIterator[IngestPiece]:
    for piece in pieces:
        yield piece
    if not ends:
        await asyncio.Event().wait()


def header(upload_id: str = "", client: str = "", context: str = "moby", size: int | None = None) -> IngestHeader:
    return IngestHeader(context, upload_id=upload_id, client=client, total_bytes=size)


def expiring(expires: float, upload_id: str = "", *, is_pinned: bool = False) -> IngestHeader:
    pin = True if is_pinned else UNSET
    return IngestHeader("moby", upload_id=upload_id, settings=ContextSettings(expires=expires, is_pinned=pin))


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[IngestBench]:
    made = IngestBench(tmp_path, SILENCE, max_uploads=4, max_bytes=80_000)
    yield made
    made.uploads.sessions.audit()
    await made.threads.close()


@pytest.mark.parametrize("pieces", [(), (header(),), (header(), b"call me"), (header(), (1, 2, 3))])
async def test_silent_stream_times_out_and_leaves_nothing(made: IngestBench, pieces: tuple[IngestPiece, ...]) -> None:
    with pytest.raises(DeadlineExceeded, match=r"sent nothing for 50 ms"):
        await made.run(*pieces, ends=False)
    assert made.uploads.sessions.num_bytes == 0
    assert not made.engine.contexts


async def test_resumable_ingest_continues_after_a_silent_stream(made: IngestBench) -> None:
    with pytest.raises(DeadlineExceeded):
        await made.run(header("mine"), b"call me ", ends=False)
    assert made.uploads.sessions.num_bytes > 0
    reports = await made.run(header("mine"), b"Ishmael")
    assert (reports[0].received_bytes, reports[-1].phase) == (8, "ready")
    assert len(made.engine.contexts["moby"]) == 2 + len("call me Ishmael")
    assert made.uploads.sessions.num_bytes == 0, "the engine has the document"


@pytest.mark.parametrize(
    "error", [ContextLost("contexts/moby", "no room"), CheckpointChanged("contexts/moby", "other weights")]
)
async def test_lost_context_can_be_ingested_again_but_not_appended_to(
    made: IngestBench, monkeypatch: pytest.MonkeyPatch, error: LongleafError
) -> None:
    def gone(context_id: str) -> int:
        raise error

    monkeypatch.setattr(made.engine, "num_tokens", gone)
    with pytest.raises(type(error)):
        await made.run(replace(header(), append=True), b"call me")
    assert (await made.run(header(), b"call me"))[-1].phase == "ready"


async def test_ingest_reports_a_recovery(made: IngestBench) -> None:
    """Each report is sent as it arrives; a slow stream gets only the last one."""
    lost = Recovering(8, 32, 64)
    made.engine.interlude = (lost, Progress(3, 4))
    engine_stream = made.engine.ingest(engine_messages.DocumentPrompt(context="moby", token_ids=(1, 2, 3, 4)))
    begun = IngestProgress(phase="prefilling", total=4)
    reports = [report async for report in made.ingest._reports(header(), engine_stream, begun)]
    reported = [(report.phase, report.processed, report.recovering) for report in reports]
    counts = [("prefilling", 2, None), ("recovering", 2, lost), ("prefilling", 3, None), ("prefilling", 4, None)]
    assert reported == [*counts, ("ready", 4, None)]


async def test_pieces_are_freed_while_the_stream_is_silent(made: IngestBench) -> None:
    CALLER.set(OWNER)
    made_of: list[weakref.ref[array[int]]] = []
    remaining: list[object] = []

    async def requests() -> AsyncIterator[ingest_pb.IngestContextRequest]:
        yield ingest_pb.IngestContextRequest(config={"name": "contexts/moby"})
        yield ingest_pb.IngestContextRequest(token_ids={"ids": [1] * 1000})
        remaining.extend(ref() for ref in made_of)  # when the next piece is requested

    async def recorded() -> AsyncIterator[IngestPiece]:
        async for piece in _pieces(requests(), made.threads, "here"):
            if isinstance(piece, array):
                made_of.append(weakref.ref(piece))
            yield piece
            del piece

    async with aclosing(made.ingest.run(recorded())) as reports:
        assert [report async for report in reports][-1].phase == "ready"
    assert remaining == [None]


async def test_too_many_streams_are_refused_before_they_send_data(made: IngestBench) -> None:
    """Two open streams of one client have been answered."""
    gate = [made.ingest.run(stream(header(context=f"c{i}", client="a"), ends=False)) for i in range(2)]
    for reports in gate:
        assert (await anext(reports)).phase == "receiving"
    with pytest.raises(ResourceExhausted, match="2 of client 'a'") as caught:
        await made.run(header(context="c2", client="a"), b"never taken")
    assert caught.value.retry_seconds
    assert (await made.run(header(context="c2", client="b"), b"taken"))[-1].phase == "ready"
    await gate[0].aclose()
    assert (await made.run(header(context="c3", client="a"), b"taken"))[-1].phase == "ready"
    await gate[1].aclose()


async def test_piece_is_counted_before_it_is_processed(made: IngestBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: object) -> None:
        raise AssertionError("a piece is taken for which there is no room")

    monkeypatch.setattr(DocumentTokenizer, "add_ids", take)
    monkeypatch.setattr(DocumentTokenizer, "receive", take)
    for piece in (b"a" * 40_001, array("I", [5]) * 10_001):
        with pytest.raises(ResourceExhausted, match="the limit of client '' is 40,000"):
            await made.run(header(), piece)
    assert made.uploads.sessions.num_bytes == 0


async def test_document_continues_when_space_is_available(tmp_path: Path) -> None:
    made = IngestBench(tmp_path, 60.0, max_bytes=80_000)
    other = asyncio.create_task(made.run(header("other", context="other"), (1,) * 8000, ends=False))
    while True:
        if made.uploads.sessions.num_bytes >= 32_000:
            break
        await asyncio.sleep(0.001)
    with pytest.raises(ResourceExhausted, match=r"use 40,0\d\d bytes of memory; the limit is 40,000") as caught:
        await made.run(header("mine"), (1,) * 1000, (1,) * 1001)
    assert caught.value.retry_seconds
    other.cancel()
    await asyncio.wait([other])
    reports = await made.run(header("mine"), (2,) * 9)
    assert reports[0].received_tokens == 1000
    assert made.engine.contexts["moby"] == [1] * 1000 + [2] * 9
    made.uploads.sessions.audit()
    await made.threads.close()


async def test_tokens_of_a_waiting_document_are_charged_once(tmp_path: Path) -> None:
    CALLER.set(Caller(quotas=Quotas(tokens_in_per_minute=5)))
    made = IngestBench(tmp_path, 60.0, quotas=QuotaEnforcer(lambda _: TenantUsage(), lambda: 0.0))
    made.engine.error = ResourceExhausted("queue", "others wait already", 1.0)
    for ids in ([(1,) * 10], [], []):
        with pytest.raises(ResourceExhausted, match="queue"):
            await made.run(header("mine"), *ids)
    made.engine.error = None
    assert (await made.run(header("mine")))[-1].context
    with pytest.raises(ResourceExhausted, match="quotas/tokens_in_per_minute"):
        await made.run(header("next", context="next"), (1,))
    await made.threads.close()


async def test_document_shorter_than_its_size_is_refused(made: IngestBench) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.total_size_bytes: 15 bytes are declared, .* after 7"):
        await made.run(header(size=15), b"call me")
    assert not made.engine.schedulings, "the engine never received it"
    assert made.uploads.sessions.num_bytes == 0
    assert (await made.run(header(size=7), b"call me"))[-1].phase == "ready"


async def test_resumable_ingest_is_retained_when_it_is_too_short(made: IngestBench) -> None:
    text = "call me Ismaël".encode()
    with pytest.raises(InvalidArgument, match="15 bytes are declared"):
        await made.run(header("mine", size=15), text[:13])  # inside a character
    reports = await made.run(header("mine", size=15), text[13:])
    assert (reports[0].received_bytes, reports[-1].phase) == (13, "ready")
    assert len(made.engine.contexts["moby"]) == 2 + 15


async def test_data_beyond_the_size_is_refused(made: IngestBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object) -> None:
        raise AssertionError("text is taken that is too much")

    monkeypatch.setattr(DocumentTokenizer, "_decode", decode)
    with pytest.raises(
        InvalidArgument, match=r"config\.total_size_bytes: 6 bytes are declared, but 7 have been received"
    ):
        await made.run(header("mine", size=6), b"call me")
    assert made.uploads.sessions.num_bytes == 0
    assert (await anext(made.ingest.run(stream(header("mine"), ends=False)))).received_bytes == 0, "it is not retained"


async def test_ids_have_no_size_in_bytes(made: IngestBench) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.total_size_bytes: 12 bytes of text are declared"):
        await made.run(header(size=12), (1, 2, 3))


async def test_upload_keeps_its_size(made: IngestBench) -> None:
    """A client that resumes with another size has another document; the size may be sent late."""
    with pytest.raises(DeadlineExceeded):
        await made.run(header("mine"), b"call me ", ends=False)
    with pytest.raises(InvalidArgument, match="7 bytes are declared, but 8 have been received"):
        await made.run(header("mine", size=7))
    with pytest.raises(InvalidArgument, match=r"15 bytes are declared, .* after 8"):
        await made.run(header("mine", size=15))
    with pytest.raises(InvalidArgument, match="16 bytes are declared, but 15 were declared before"):
        await made.run(header("mine", size=16))
    assert (await made.run(header("mine"), b"Ishmael"))[-1].phase == "ready"


@pytest.mark.parametrize("upload_id", ["", "mine"])
async def test_ingest_ends_when_its_context_expires(tmp_path: Path, upload_id: str) -> None:
    made = IngestBench(tmp_path, 60.0)
    with pytest.raises(InvalidArgument, match=r"config\.expire_time") as caught:
        await made.run(expiring(made.date + 0.05, upload_id), b"call me", ends=False)
    assert caught.value.field == "config.expire_time"
    assert made.uploads.sessions.num_bytes == 0
    assert not made.engine.schedulings
    assert (await made.run(header(upload_id), b"other"))[0].received_bytes == 0
    await made.threads.close()


async def test_expiry_ends_an_ingest_that_never_pauses(made: IngestBench) -> None:
    reports = made.ingest.run(endless(expiring(made.date + 10)))
    assert (await anext(reports)).phase == "receiving"
    made.date += 10
    with pytest.raises(InvalidArgument, match=r"config\.expire_time"):
        [_ async for _ in reports]


async def endless(first: IngestHeader) -> AsyncIterator[IngestPiece]:
    yield first
    while True:
        yield b"a"


async def test_pinned_context_does_not_expire_during_ingest(made: IngestBench) -> None:
    reports = made.ingest.run(stream(expiring(made.date + 10, is_pinned=True), b"call me", ends=True))
    await anext(reports)
    made.date += 20
    assert [report async for report in reports][-1].phase == "ready"


async def test_expiry_during_acknowledgement_is_reported(made: IngestBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It expires between the last step and the response to the client."""

    def expire(context_id: str) -> None:
        if made.engine.schedulings:
            made.date += 10
        raise NotFound(f"contexts/{context_id}")

    monkeypatch.setattr(made.engine, "get_context", expire)
    with pytest.raises(InvalidArgument, match=r"config\.expire_time"):
        await made.run(expiring(made.date + 10), b"call me")
