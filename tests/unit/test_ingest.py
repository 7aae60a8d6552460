"""An ingest whose client falls silent, and more of them than there is room for."""

import asyncio
import weakref
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from coordinator.document import Document
from coordinator.ingest import Ingest
from coordinator.servicers import _pieces
from coordinator.template import split_template
from coordinator.text_threads import TextThreads
from coordinator.tokenizer import Tokenizer
from coordinator.uploads import Uploads
from longleaf.errors import DeadlineExceeded, ResourceExhausted
from longleaf.messages import IngestHeader, IngestPiece, IngestProgress
from longleaf.v1 import context_service_pb2 as ingest_pb
from tests.service import FakeEngine, write_model

pytestmark = pytest.mark.timeout(60)
SILENCE = 0.05


class Made:
    """Ingests of an engine, and what they hold."""

    def __init__(self, folder: Path, idle_seconds: float, **limits: int) -> None:
        self.engine, self.threads = FakeEngine(), TextThreads()
        self.engine.max_positions = 1 << 20
        self.uploads = Uploads(**limits)
        tokenizer = Tokenizer.load(write_model(folder), split_template)
        self.ingest = Ingest(self.engine, tokenizer, self.threads, uploads=self.uploads, idle_seconds=idle_seconds)

    async def run(self, *pieces: IngestPiece, ends: bool = True) -> list[IngestProgress]:
        """What is said of these pieces, after which the stream ends or is silent."""
        async with aclosing(self.ingest.run(stream(*pieces, ends=ends))) as reports:
            return [report async for report in reports]


async def stream(*pieces: IngestPiece, ends: bool) -> AsyncIterator[IngestPiece]:
    for piece in pieces:
        yield piece
    if not ends:
        await asyncio.Event().wait()


def header(upload_id: str = "", client: str = "", context: str = "moby") -> IngestHeader:
    return IngestHeader(context, upload_id=upload_id, client=client)


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Made]:
    made = Made(tmp_path, SILENCE, max_uploads=4, max_bytes=80_000)
    yield made
    made.uploads.check()
    await made.threads.close()


@pytest.mark.parametrize("pieces", [(), (header(),), (header(), b"call me"), (header(), (1, 2, 3))])
async def test_a_stream_that_sends_nothing_is_ended_and_leaves_nothing(
    made: Made, pieces: tuple[IngestPiece, ...]
) -> None:
    with pytest.raises(DeadlineExceeded, match=r"sent nothing for 0\.05 seconds"):
        await made.run(*pieces, ends=False)
    assert made.uploads.num_bytes == 0
    assert not made.engine.contexts


async def test_one_that_can_be_resumed_goes_on_where_it_fell_silent(made: Made) -> None:
    with pytest.raises(DeadlineExceeded):
        await made.run(header("mine"), b"call me ", ends=False)
    assert made.uploads.num_bytes > 0
    reports = await made.run(header("mine"), b"Ishmael")
    assert (reports[0].received_bytes, reports[-1].phase) == (8, "ready")
    assert len(made.engine.contexts["moby"]) == 2 + len("call me Ishmael")
    assert made.uploads.num_bytes == 0, "the engine has it"


async def test_nothing_of_a_piece_is_held_while_its_stream_is_silent(made: Made) -> None:
    made_of: list[weakref.ref[array[int]]] = []
    held: list[object] = []

    async def requests() -> AsyncIterator[ingest_pb.IngestContextRequest]:
        yield ingest_pb.IngestContextRequest(config={"name": "contexts/moby"})
        yield ingest_pb.IngestContextRequest(token_ids={"ids": [1] * 1000})
        held.extend(ref() for ref in made_of)  # asked for the next one

    async def noted() -> AsyncIterator[IngestPiece]:
        async for piece in _pieces(requests(), made.threads, "here"):
            if isinstance(piece, array):
                made_of.append(weakref.ref(piece))
            yield piece
            del piece

    async with aclosing(made.ingest.run(noted())) as reports:
        assert [report async for report in reports][-1].phase == "ready"
    assert held == [None]


async def test_too_many_streams_are_refused_before_they_send(made: Made) -> None:
    """Two of one client that have been answered, and are open."""
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


async def test_a_piece_counts_before_it_is_taken(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: object) -> None:
        raise AssertionError("a piece is taken for which there is no room")

    monkeypatch.setattr(Document, "add_ids", take)
    monkeypatch.setattr(Document, "receive", take)
    for piece in (b"a" * 40_001, array("I", [5]) * 10_001):
        with pytest.raises(ResourceExhausted, match="at most 40000 are for a client"):
            await made.run(header(), piece)
    assert made.uploads.num_bytes == 0


async def test_a_document_for_which_there_is_no_room_goes_on_when_there_is(tmp_path: Path) -> None:
    made = Made(tmp_path, 60.0, max_bytes=80_000)
    other = asyncio.create_task(made.run(header("other", context="other"), (1,) * 8000, ends=False))
    while True:
        if made.uploads.num_bytes >= 32_000:
            break
        await asyncio.sleep(0.001)
    with pytest.raises(ResourceExhausted, match=r"hold 400\d\d bytes, at most 40000") as caught:
        await made.run(header("mine"), (1,) * 1000, (1,) * 1001)
    assert caught.value.retry_seconds
    other.cancel()
    await asyncio.wait([other])
    reports = await made.run(header("mine"), (2,) * 9)
    assert reports[0].received_tokens == 1000
    assert made.engine.contexts["moby"] == [1] * 1000 + [2] * 9
    made.uploads.check()
    await made.threads.close()
