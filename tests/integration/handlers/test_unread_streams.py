"""Clients that open streams and do not read them, over real sockets: a real engine with ranks that answer by
arithmetic."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from coordinator.engine.engine import Engine
from longleaf import codec
from longleaf.client import AsyncClient
from longleaf.codec.status import decode_error
from longleaf.errors import ResourceExhausted
from longleaf.types import Delta, GenerateOptions, Resume
from longleaf.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.support.fakes.ranks import FakeRanks
from tests.support.gated import VOCAB, comes_to, serving

pytestmark = pytest.mark.timeout(60)

CAPACITY = {"max_sequences": 2, "max_waiting": 3}
NUM_TOKENS = 3000
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
OPTIONS: GenerateOptions = {"use_chat_template": False, "max_tokens": 3, "ignore_end_token": True, "client": "honest"}


class Unread:
    """A service and streams of it without a reader."""

    def __init__(self, engine: Engine, address: str, channel: grpc.aio.Channel) -> None:
        self.engine, self.address = engine, address
        self._stub = GenerationServiceStub(channel)

    @property
    def num_unread(self) -> int:
        assert self.engine._scheduler is not None
        return self.engine._scheduler.num_unread

    @property
    def num_jobs(self) -> int:
        cluster = self.engine.cluster()
        return cluster.running + cluster.waiting

    def open(self, seconds: float = 0.0, request_id: str = "", client: str = "") -> grpc.aio.UnaryStreamCall:
        options: GenerateOptions = {"max_tokens": NUM_TOKENS, "ignore_end_token": True}
        options |= {"use_chat_template": False, "client": client}
        return self._stub.Generate(
            codec.encode_generate("x", None, options, request_id=request_id, resume_seconds=seconds)
        )

    def resume(self, request_id: str) -> grpc.aio.UnaryStreamCall:
        return self._stub.Generate(codec.encode_resume(Resume(request_id, 0)))

    async def ask(self) -> list[int]:
        """The tokens of a client that reads."""
        async with AsyncClient(self.address, retries=0) as client:
            events = client.generate("y", **OPTIONS)
            return [i async for event in events if isinstance(event, Delta) for i in event.token_ids]


@asynccontextmanager
async def unread(folder: Path, **settings: float) -> AsyncIterator[Unread]:
    ranks = FakeRanks(num_blocks=8192, vocab=VOCAB)
    async with (
        serving(ranks, folder, **settings) as (engine, address),
        grpc.aio.insecure_channel(address, SMALL_WINDOW) as channel,
    ):
        yield Unread(engine, address, channel)
        engine.audit()


async def test_unread_streams_do_not_block_other_requests(tmp_path: Path) -> None:
    async with unread(tmp_path, **CAPACITY) as streams:
        calls = []
        for number in range(5):
            calls.append(streams.open())
            await comes_to(streams.engine, lambda number=number: streams.num_unread == number + 1)
        assert len(await streams.ask()) == 3
        assert streams.num_unread == 5


async def test_longest_unread_stream_of_the_client_with_most_is_ended(
    tmp_path: Path,
) -> None:
    async with unread(tmp_path, **CAPACITY) as streams:
        calls = []
        for number in range(5):
            calls.append(streams.open(client="patient" if number == 0 else "many"))
            await comes_to(streams.engine, lambda number=number: streams.num_unread == number + 1)
        calls.append(streams.open(client="another"))
        await comes_to(streams.engine, lambda: streams.num_jobs == 6)
        await comes_to(streams.engine, lambda: streams.num_jobs == 5)
        with pytest.raises(ResourceExhausted, match="stream: more than 5 answers are unread"):
            await read_all(calls[1])
        assert streams.num_unread <= 5
        assert await read_all(calls[0]) == NUM_TOKENS
        assert len(await streams.ask()) == 3


async def test_unread_stream_ends_after_the_limit(tmp_path: Path) -> None:
    async with unread(tmp_path, unread_timeout=0.3) as streams:
        calls = [streams.open() for _ in range(3)]
        await comes_to(streams.engine, lambda: streams.engine.cluster().running == 3)
        await comes_to(streams.engine, lambda: streams.num_jobs == 0)
        assert sum(worker.tokens for worker in streams.engine.cluster().workers) == 0
        for call in calls:
            with pytest.raises(ResourceExhausted, match=r"stream: not read for 300 ms"):
                await read_all(call)


async def test_retained_generation_survives_its_unread_stream(tmp_path: Path) -> None:
    async with unread(tmp_path, unread_timeout=2.0) as streams:
        call = streams.open(seconds=60.0, request_id="one")
        await comes_to(streams.engine, lambda: streams.num_unread == 1)
        later = streams.open()
        await comes_to(streams.engine, lambda: streams.num_unread == 2)
        await comes_to(streams.engine, lambda: streams.engine.cluster().running == 1)
        for unread_call in (call, later):
            with pytest.raises(ResourceExhausted, match="stream: not read"):
                await read_all(unread_call)
        assert await read_all(streams.resume("one")) == NUM_TOKENS


async def read_all(call: grpc.aio.UnaryStreamCall) -> int:
    """The received tokens. Raises typed errors."""
    index = 0
    try:
        async for response in call:
            event = codec.decode_event(response)
            if isinstance(event, Delta):
                assert event.index == index
                index += len(event.token_ids)
    except grpc.RpcError as error:
        raise decode_error(error, "here") from None
    return index
