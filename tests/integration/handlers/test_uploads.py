"""Ingests in pieces of any size, and ingests whose connection breaks, over real sockets."""

import asyncio
import io
import random
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.handlers.fair_share import CLIENT_SHARE
from coordinator.handlers.uploads import MAX_UPLOADS
from longleaf.client import AsyncClient, Client, Retries
from longleaf.client.documents import Document, Part, pieces_of
from longleaf.client.upload import header_of
from longleaf.codec.status import decode_error
from longleaf.config import MAX_REQUEST_BYTES
from longleaf.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from longleaf.types import IngestProgress
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1.context_service_pb2_grpc import ContextServiceStub
from tests.support.network.proxy import breaking
from tests.support.service import BYTES, Served, ids

pytestmark = pytest.mark.timeout(60)

OPENING = [BYTES.token_to_id("<|begin|>"), BYTES.token_to_id("<|user|>")]
SIZE = "config.total_size_bytes"
PIECE = 1 << 18
"""Bytes after which a report comes."""


def long_text(num_characters: int) -> str:
    draw = random.Random(11)
    return "".join(draw.choices("abc  \nGrüße, 世界! 🦙e\u0301", k=num_characters))


@pytest.fixture
def roomy(service: Served) -> Served:
    service.engine.max_positions = 1 << 23
    service.engine.total_tokens = 1 << 23
    return service


def cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 21], ids=str)
async def test_pieces_may_have_any_size(roomy: Served, size: int) -> None:
    text = long_text(2000 if size < 100 else 200_000)
    seen: list[IngestProgress] = []
    context = await roomy.client.ingest("moby", cut(text.encode(), size), on_progress=seen.append)
    assert roomy.engine.contexts["moby"] == [*OPENING, *ids(text)]
    assert context.tokens == 2 + len(ids(text))
    if size >= 100:
        growing = [progress.received_tokens for progress in seen if progress.phase == "receiving"]
        assert growing == sorted(growing)
        assert 0 < growing[-1] < context.tokens, "tokenization runs during the upload"


async def test_token_ids_may_arrive_in_pieces_of_any_size(roomy: Served) -> None:
    token_ids = tuple(random.Random(3).choices(range(200), k=300_000))

    async def upward() -> AsyncIterator[ingest_pb.IngestContextRequest]:
        yield ingest_pb.IngestContextRequest(config={"name": "contexts/moby"})
        for piece in (token_ids[:1], (), token_ids[1:250_000], token_ids[250_000:]):
            yield ingest_pb.IngestContextRequest(token_ids={"ids": piece})

    async with grpc.aio.insecure_channel(roomy.address) as channel:
        async for _ in ContextServiceStub(channel).IngestContext(upward()):
            pass
    assert roomy.engine.contexts["moby"] == list(token_ids)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "shape",
    [lambda text: text, lambda text: cut(text.encode(), 5000), lambda text: ids(text)],
    ids=["text", "iterator", "ids"],
)
async def test_two_connection_losses_lose_no_data(
    roomy: Served, shape: Callable[[str], Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longleaf.client.documents.PIECE_BYTES", 1 << 14)
    monkeypatch.setattr("longleaf.client.documents.PIECE_TOKENS", 1 << 12)
    text = long_text(150_000)
    seen: list[IngestProgress] = []
    async with breaking(roomy.address, 80_000, 90_000) as (proxy, address), AsyncClient(address) as client:
        context = await client.ingest("moby", shape(text), upload_id="mine", on_progress=seen.append)
        assert proxy.num_dropped == 2
    offsets = [max(p.received_bytes, p.received_tokens) for p in seen if p.phase == "receiving"]
    assert 0 < max(offsets) < len(text.encode()), "received data is not sent again"
    opening = [] if isinstance(shape(text), tuple) else OPENING
    assert roomy.engine.contexts["moby"] == [*opening, *ids(text)]
    assert context.tokens == len(opening) + len(ids(text))


async def test_system_message_survives_connection_losses(roomy: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longleaf.client.documents.PIECE_BYTES", 1 << 14)
    text = long_text(150_000)
    async with breaking(roomy.address, 80_000, 90_000) as (proxy, address), AsyncClient(address) as client:
        await client.ingest("moby", text, upload_id="mine", system="Be brief.")
        assert proxy.num_dropped == 2
    assert roomy.engine.contexts["moby"] == [*OPENING, *ids("Be brief."), *ids(text)]


async def test_connection_loss_without_an_upload_id_leaves_nothing(roomy: Served) -> None:
    text = long_text(100_000)
    async with breaking(roomy.address, 100_000) as (_, address), AsyncClient(address) as client:
        with pytest.raises(Unavailable):
            await client.ingest("moby", text)
        assert not roomy.engine.contexts
        assert (await client.ingest("moby", text)).tokens == 2 + len(ids(text))


async def test_retries_end_when_the_service_stays_unavailable(roomy: Served) -> None:
    quick = Retries(limit=2, first_delay=0.0)
    async with breaking(roomy.address, *[100] * 50) as (_, address), AsyncClient(address, retries=quick) as client:
        with pytest.raises(Unavailable):
            await client.ingest("moby", "text", upload_id="mine")


class Raw:
    """One stream, driven by hand."""

    def __init__(self, channel: grpc.aio.Channel, **config: Any) -> None:
        self.call = ContextServiceStub(channel).IngestContext()
        self._config = config

    async def open(self) -> ingest_pb.IngestContextResponse:
        config = {"name": "contexts/moby", "upload_id": "mine"} | self._config
        await self.call.write(ingest_pb.IngestContextRequest(config=config))
        return await self.call.read()

    async def send(self, text: bytes) -> ingest_pb.IngestContextResponse:
        """The first report after a piece that is long enough for one."""
        await self.call.write(ingest_pb.IngestContextRequest(text=text))
        return await self.call.read()

    async def finish(self) -> ingest_pb.IngestContextResponse:
        """The last report."""
        await self.call.done_writing()
        last = None
        while (response := await self.call.read()) is not grpc.aio.EOF:
            last = response
        assert last is not None
        return last


async def test_stalled_streams_are_limited_per_client(roomy: Served, channel: grpc.aio.Channel) -> None:
    share = int(MAX_UPLOADS * CLIENT_SHARE)
    stalled = [Raw(channel, name=f"contexts/c{number}", client_id="stalls") for number in range(share)]
    for stream in stalled:
        assert (await stream.open()).received_size_bytes == 0
    settings: dict[str, Any] = {"client": "stalls"}
    with pytest.raises(ResourceExhausted, match=f"{share} of client 'stalls'") as caught:
        async with AsyncClient(roomy.address, retries=0) as client:
            await client.ingest("more", "text", **settings)
    assert caught.value.retry_seconds
    assert (await roomy.client.ingest("other", "text", client="honest")).tokens == 6
    for stream in stalled:
        stream.call.cancel()


async def test_offset_is_the_number_of_received_bytes(roomy: Served, channel: grpc.aio.Channel) -> None:
    text = long_text(200_000).encode()
    first = Raw(channel)
    assert (await first.open()).received_size_bytes == 0
    assert (await first.send(text[:PIECE])).received_size_bytes == PIECE
    first.call.cancel()
    second = Raw(channel)
    answer = await second.open()
    assert (answer.phase, answer.received_size_bytes) == (ingest_pb.INGEST_PHASE_RECEIVING, PIECE)
    await second.call.write(ingest_pb.IngestContextRequest(text=text[PIECE:]))
    assert (await second.finish()).phase == ingest_pb.INGEST_PHASE_READY
    assert roomy.engine.contexts["moby"] == [*OPENING, *ids(text.decode())]


async def test_newest_stream_takes_over(roomy: Served, channel: grpc.aio.Channel) -> None:
    text = long_text(200_000).encode()
    old, new = Raw(channel), Raw(channel)
    await old.open()
    await old.send(text[:PIECE])
    assert (await new.open()).received_size_bytes == PIECE
    with pytest.raises(grpc.aio.AioRpcError, match="another stream") as caught:
        await old.finish()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    await new.call.write(ingest_pb.IngestContextRequest(text=text[PIECE:]))
    await new.finish()
    assert roomy.engine.contexts["moby"] == [*OPENING, *ids(text.decode())]


async def test_prefill_continues_without_its_stream(service: Served, channel: grpc.aio.Channel) -> None:
    service.engine.is_endless = True
    first = Raw(channel)
    await first.open()
    await first.call.write(ingest_pb.IngestContextRequest(text=b"some text"))
    await first.call.done_writing()
    while (await first.call.read()).phase != ingest_pb.INGEST_PHASE_PREFILLING:
        pass
    await service.engine.opened.wait()
    first.call.cancel()
    second = Raw(channel)
    answer = await second.open()
    assert (answer.phase, answer.total_token_count) == (ingest_pb.INGEST_PHASE_PREFILLING, 11)
    [stream] = service.engine.streams
    assert not stream.closed.is_set()
    stream.released.set()
    last = await second.finish()
    assert (last.phase, last.context.token_count) == (ingest_pb.INGEST_PHASE_READY, 11)
    assert await Raw(channel).open() == last, "a later request gets the same report"


@pytest.mark.parametrize("append", [False, True])
async def test_acknowledged_ingest_can_be_repeated(service: Served, append: bool) -> None:
    service.engine.contexts = {"moby": [1]} if append else {}
    first = await service.client.ingest("moby", "some text", append=append, upload_id="mine")
    again = await service.client.ingest("moby", "some text", append=append, upload_id="mine")
    assert again == first
    assert service.engine.contexts["moby"] == ([1] if append else OPENING) + list(ids("some text"))
    with pytest.raises(InvalidArgument, match=r"config\.append"):
        await service.client.ingest("moby", "some text", append=not append, upload_id="mine")


async def test_cancelled_ingest_ends_in_any_phase_and_leaves_nothing(
    service: Served, channel: grpc.aio.Channel
) -> None:
    service.engine.contexts["book"] = [1]
    receiving, reading = Raw(channel), Raw(channel, name="contexts/book", append=True)
    await receiving.open()
    await receiving.call.write(ingest_pb.IngestContextRequest(text=b"some"))
    service.engine.is_endless = True
    await reading.open()
    await reading.call.write(ingest_pb.IngestContextRequest(text=b"text"))
    await reading.call.done_writing()
    await service.engine.opened.wait()
    for name, stream in (("moby", receiving), ("book", reading)):
        await service.client.cancel_ingest(name, "mine")
        with pytest.raises(grpc.aio.AioRpcError, match="was cancelled") as caught:
            await stream.finish()
        assert caught.value.code() == grpc.StatusCode.ABORTED
        with pytest.raises(NotFound, match="upload mine of contexts/"):
            await service.client.cancel_ingest(name, "mine")
    [stream] = service.engine.streams
    assert stream.closed.is_set()
    assert service.engine.contexts == {"book": [1]}
    assert (await Raw(channel).open()).received_size_bytes == 0


async def test_interrupted_upload_is_cancelled_and_a_finished_one_is_not(
    service: Served, channel: grpc.aio.Channel
) -> None:
    left = Raw(channel)
    await left.open()
    await left.call.write(ingest_pb.IngestContextRequest(text=b"some"))
    left.call.cancel()
    await service.client.cancel_ingest("moby", "mine")
    assert (await Raw(channel).open()).received_size_bytes == 0
    made = await service.client.ingest("book", "some text", upload_id="mine")
    with pytest.raises(NotFound):
        await service.client.cancel_ingest("book", "mine")
    assert await service.client.get_context("book") == made
    for wrong in ("", "yours"):
        with pytest.raises(NotFound):
            await service.client.cancel_ingest("moby", wrong)


async def test_different_upload_id_is_a_different_ingest(service: Served) -> None:
    await service.client.ingest("moby", "some text", upload_id="mine")
    with pytest.raises(AlreadyExists):
        await service.client.ingest("moby", "some text", upload_id="yours")
    await service.client.delete_context("moby")
    service.engine.created = 9.5
    await service.client.ingest("moby", "other text", upload_id="yours")
    with pytest.raises(AlreadyExists):
        await service.client.ingest("moby", "some text", upload_id="mine")


async def test_deleted_context_can_be_ingested_again(service: Served) -> None:
    await service.client.ingest("moby", "some text", upload_id="mine")
    await service.client.delete_context("moby")
    await service.client.ingest("moby", "other text", upload_id="mine")
    assert service.engine.contexts["moby"] == [*OPENING, *ids("other text")]


async def test_document_without_capacity_need_not_be_sent_again(service: Served, channel: grpc.aio.Channel) -> None:
    service.engine.error = ResourceExhausted("pool", "full", 2.0)
    async with AsyncClient(service.address, retries=0) as impatient:
        with pytest.raises(ResourceExhausted):
            await impatient.ingest("moby", "some text", upload_id="mine")
    service.engine.error = None
    again = Raw(channel)
    assert (await again.open()).received_size_bytes == len("some text")
    assert (await again.finish()).context.token_count == 11


@pytest.mark.parametrize("wrong", [b"\xff", b"a" * 400_000])
async def test_refused_document_is_not_retained(service: Served, channel: grpc.aio.Channel, wrong: bytes) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="text"):
            await service.client.ingest("moby", iter([b"good", wrong]), upload_id="mine")
    assert (await Raw(channel).open()).received_size_bytes == 0


async def test_truncated_document_is_not_acknowledged_and_resumes(service: Served, channel: grpc.aio.Channel) -> None:
    """A stream that ends without an error, but too early."""
    text = b"some text"
    cut = Raw(channel, total_size_bytes=len(text))
    await cut.open()
    await cut.call.write(ingest_pb.IngestContextRequest(text=text[:4]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cut.finish()
    error = decode_error(caught.value, "here")
    assert isinstance(error, InvalidArgument)
    assert (error.field, "9 bytes" in error.description, "after 4" in error.description) == (SIZE, True, True)
    assert not service.engine.contexts
    seen: list[IngestProgress] = []
    await service.client.ingest("moby", text, upload_id="mine", on_progress=seen.append)
    assert seen[0].received_bytes == 4
    assert service.engine.contexts["moby"] == [*OPENING, *ids(text.decode())]


@pytest.mark.parametrize("size", [1, 8])
async def test_file_changed_during_upload_is_not_acknowledged(roomy: Served, tmp_path: Path, size: int) -> None:
    """The clients send the length of files."""
    first, second = file_of(tmp_path, "a", bytes(2 * PIECE)), file_of(tmp_path, "b", b"text")

    def change(progress: IngestProgress) -> None:
        second.write_bytes(bytes(size))

    with pytest.raises(
        InvalidArgument, match=rf"{2 * PIECE + 4:,} bytes are declared, .* {2 * PIECE + size:,}"
    ) as caught:
        await roomy.client.ingest("moby", [first, second], on_progress=change)
    assert caught.value.field == SIZE
    assert not roomy.engine.contexts


@pytest.mark.parametrize(
    "shape",
    [
        lambda folder: "text",
        lambda folder: b"text",
        lambda folder: file_of(folder, "a", b"text"),
        lambda folder: ["te", file_of(folder, "a", b"xt")],
    ],
    ids=["text", "bytes", "path", "parts"],
)
def test_clients_send_the_length_of_a_document(tmp_path: Path, shape: Callable[[Path], Document]) -> None:
    assert header_of("moby", shape(tmp_path), {}).total_bytes == 4


async def test_long_upload_id_is_refused(service: Served) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.upload_id.*128"):
        await service.client.ingest("moby", "text", upload_id="x" * 129)


async def test_uploads_of_many_clients_stay_separate(roomy: Served) -> None:
    texts = [long_text(2000 + number) for number in range(8)]
    await asyncio.gather(
        *(roomy.client.ingest(f"c{number}", text, upload_id="mine") for number, text in enumerate(texts))
    )
    found: Sequence[list[int]] = [roomy.engine.contexts[f"c{number}"] for number in range(8)]
    assert found == [[*OPENING, *ids(text)] for text in texts]


async def numbers(*parts: Part) -> AsyncIterator[Part]:
    for part in parts:
        yield part


def file_of(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize(
    "shape",
    [
        lambda folder: [file_of(folder, "a", b"one "), file_of(folder, "b", b"two")],
        lambda folder: ("one ", b"two"),
        lambda folder: iter(["one ", "two"]),
        lambda folder: numbers("one ", b"t", "wo"),
        lambda folder: file_of(folder, "a", b"one two").open("rb"),
        lambda folder: file_of(folder, "a", b"one two").open("r"),
        lambda folder: [io.BytesIO(b"one "), file_of(folder, "b", b"two")],
        lambda folder: bytearray(b"one two"),
        lambda folder: memoryview(b"one two"),
        lambda folder: memoryview(b"o.n.e. .t.w.o.")[::2],
        lambda folder: iter([bytearray(b"one "), memoryview(b"two")]),
    ],
    ids=(
        "paths,text and bytes,iterator,async iterator,binary file,text file,file and path,"
        "bytearray,memoryview,memoryview with steps,mutable parts"
    ).split(","),
)
async def test_text_may_have_several_parts_of_any_type(
    service: Served, tmp_path: Path, shape: Callable[[Path], Document]
) -> None:
    await service.client.ingest("moby", shape(tmp_path))
    assert service.engine.contexts["moby"] == [*OPENING, *ids("one two")]


@pytest.mark.parametrize(
    "document",
    [
        [5, 6, 7],
        (5, 6, 7),
        array("I", [5, 6, 7]),
        range(5, 8),
        [[5], (6, 7)],
        iter([(5, 6), [7]]),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint8),
        np.array([[5, 6, 7]] * 2, dtype=">i4")[0],
        list(np.array([5, 6, 7])),
        [np.array([5, 6]), np.array([7])],
    ],
    ids="list,tuple,array,range,lists,iterator,numpy,numpy bytes,big endian,list of numpy ids,numpy parts".split(","),
)
async def test_token_ids_may_be_any_sequence(service: Served, document: Document) -> None:
    assert (await service.client.ingest("moby", document)).tokens == 3
    assert service.engine.contexts["moby"] == [5, 6, 7]


async def test_part_may_be_larger_than_a_message() -> None:
    pieces = [piece async for piece in pieces_of(iter([bytes(MAX_REQUEST_BYTES + 1), b"end"]))]
    assert max(map(len, pieces)) == PIECE
    assert b"".join(pieces) == bytes(MAX_REQUEST_BYTES + 1) + b"end"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (7, "document: int is neither"),
        (None, "document: NoneType is neither"),
        ([b"text", 4.5], "document: float is neither"),
        ([5, 1 << 40], r"token_ids\.ids\[1\]: 1099511627776 is not a token id"),
        ([5, -1], r"token_ids\.ids\[1\]: -1 is negative"),
        ([5, "x"], r"token_ids\.ids\[1\]: str is not a token id"),
        ([5, 6.0], r"token_ids\.ids\[1\]: float is not a token id"),
        ([5, True], r"token_ids\.ids\[1\]: bool is not a token id"),
        ([5, None], r"token_ids\.ids\[1\]: NoneType is not a token id"),
        ([True, 5], r"token_ids\.ids\[0\]: bool is not a token id"),
        (np.array([5.0, 6.0]), r"token_ids\.ids\[0\]: float is not a token id"),
        (np.array([True]), r"token_ids\.ids\[0\]: bool is not a token id"),
        (np.array([[5, 6], [7, 8]]), r"token_ids\.ids\[0\]: list is not a token id"),
        (array("d", [5.0]), r"token_ids\.ids\[0\]: float is not a token id"),
        (iter([5, 6]), "document: int is neither"),
        (memoryview(array("I", [5, 6])), r"text: memoryview of shape \(2,\) with items of 4 bytes is not text"),
        ({"text": "one"}, "document: dict is neither"),
        ({"one", "two"}, "document: set is neither"),
        (["text", [5]], "token_ids: cannot be mixed with text"),
        ([[5], "text"], "text: cannot be mixed with token_ids"),
        (["a\ud800"], "text: is not Unicode"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # identical in every process
)
async def test_invalid_document_types_raise_an_error(service: Served, document: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await service.client.ingest("moby", document)
    assert not service.engine.contexts


@pytest.mark.parametrize(
    "document",
    [b"one two", bytearray(b"one two"), memoryview(b"one two"), np.array(ids("one two")), array("I", ids("one two"))],
    ids=lambda document: type(document).__name__,
)
async def test_synchronous_client_accepts_the_same_documents(service: Served, document: Any) -> None:
    def ingest() -> None:
        with Client(service.address) as client:
            client.ingest("moby", document)

    await asyncio.to_thread(ingest)
    assert service.engine.contexts["moby"][-7:] == list(ids("one two"))


@pytest.mark.parametrize("document", [{"text": "one"}, {"one"}, frozenset({b"one"})], ids=["dict", "set", "frozenset"])
async def test_synchronous_client_refuses_unordered_documents(service: Served, document: Any) -> None:
    def ingest() -> None:
        with Client(service.address) as client:
            client.ingest("moby", document)

    with pytest.raises(InvalidArgument, match=f"document: {type(document).__name__} is neither"):
        await asyncio.to_thread(ingest)
    assert not service.engine.contexts


async def test_retained_data_does_not_change_with_the_source() -> None:
    text, token_ids = bytearray(b"one"), np.array([5, 6, 7])
    pieces = [piece async for piece in pieces_of(iter([text, memoryview(text)]))]
    numbers = [list(piece) async for piece in pieces_of(token_ids)]
    text[:], token_ids[:] = b"ten", 0
    assert pieces == [b"one", b"one"]
    assert numbers == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a\ud800", {}, "context: "),
        ("moby", {"ttl": 1e300}, "settings: "),
    ],
)
async def test_unsendable_settings_raise_an_error(service: Served, name: str, settings: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await service.client.ingest(name, "text", **settings)
