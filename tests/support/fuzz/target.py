"""A service that must survive any request: makes calls, checks their status, and checks the invariants afterwards."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import msgspec
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.engine.engine import Engine
from coordinator.engine_messages import DocumentPrompt, Prompt, Tokens
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from coordinator.service import Service
from longleaf.codec.status import DETAILS_KEY
from longleaf.config import EngineConfig
from longleaf.sampling import SamplingParams
from longleaf.service_settings import ServiceConfig
from longleaf.types import Draining, ModelInfo
from tests.support.archives import packable
from tests.support.fakes.echo_model import echo_token
from tests.support.fakes.ranks import FakeRanks
from tests.support.fuzz.messages import PINNED
from tests.support.running import running
from tests.support.service import byte_tokenizer, load_tokenizer, write_model
from tests.support.transfer_engines import transfer_engine_of
from workers.__main__ import main as worker_main

PATIENCE = 30.0
"""Seconds after which a call that does not end, or blocks that are not given back, are an error."""
ENDLESS = {"WatchCluster"}
"""Streams that never end by themselves, and of which no more than one response can be counted on."""
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}
"""ABORTED: another call cancelled the generation."""
PLAIN = (5, 6, 7)
LOST_STATUS = "Internal error from Core"
"""The details of grpc.aio's client if a call ends, with any status, while the client is sending."""
LEFT = "ExecuteBatchError raised in core"
"""The message of grpc.aio's server if it answers a client that has just disconnected."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: the messages to send, the number of responses to read before the client disconnects, and the time
    limit."""

    method: MethodDescriptor
    requests: Sequence[Message | bytes]
    num_reads: int | None = None
    """None reads to the end."""
    is_torn: bool = False
    """The upload breaks off instead of ending."""
    timeout: float | None = None

    def __str__(self) -> str:
        return f"{self.method.full_name} {[str(request) for request in self.requests]}"


class Complaints(logging.Handler):
    """Collects everything that is logged as an error, including exceptions of tasks that were never awaited."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        logging.getLogger().addHandler(self)

    def take(self) -> list[str]:
        """Returns and clears the messages collected so far."""
        lines, self.lines = self.lines, []
        return lines

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith(LEFT):
            self.lines.append(self.format(record))

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        super().close()


class Target:
    """A served engine. `expected` is its answer to PLAIN."""

    def __init__(self, engine: Engine, address: str, expected: Sequence[int]) -> None:
        self._engine = engine
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),))
        self._expected = list(expected)
        self._complaints = Complaints()

    async def close(self) -> None:
        self._complaints.close()
        await self._channel.close()

    async def bear(self, *calls: Call) -> None:
        """Makes the calls at once, checks how each ends, and that the service is as it was."""
        if PINNED not in [view.id for view in self._engine.list_contexts()]:
            async for _ in self._engine.ingest(DocumentPrompt(context=PINNED, token_ids=list(range(20)))):
                pass
        for call, refusal in zip(calls, await asyncio.gather(*map(self.try_, calls)), strict=True):
            check_refusal(call, refusal)
        complaints = self._complaints.take()
        assert not complaints, "\n".join(map(str, [*calls, *complaints]))
        assert await generate(self._engine, len(self._expected)) == self._expected
        await self._wait_idle()

    async def try_(self, call: Call) -> grpc.aio.AioRpcError | None:
        """How the call ended; None when it went well or this side left it."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self._make(call)
        except grpc.aio.AioRpcError as error:
            return error
        except asyncio.CancelledError:  # raised by the library if the upload raised, or came too late
            if not call.method.client_streaming:
                raise
        return None

    async def _make(self, call: Call) -> None:
        method = call.method
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        path = f"/{method.containing_service.full_name}/{method.name}"
        stub: Any = getattr(self._channel, kind)(path, _serialize, GetMessageClass(method.output_type).FromString)
        made = stub(_upload(call) if method.client_streaming else call.requests[0], timeout=call.timeout)
        if not method.server_streaming:
            await made
            return
        num_reads = call.num_reads
        if method.name in ENDLESS:
            num_reads = 1 if num_reads is None else min(1, num_reads)
        try:
            while num_reads is None or num_reads > 0:
                if await made.read() is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
                num_reads = None if num_reads is None else num_reads - 1
        finally:
            made.cancel()

    async def _wait_idle(self) -> None:
        """Waits until abandoned calls have ended. Then only contexts may hold blocks, and without contexts no block is
        in use."""
        await until(lambda: not self._engine.cluster().waiting + self._engine.cluster().running)
        for view in self._engine.list_contexts():
            if view.id != PINNED:
                await self._engine.delete_context(view.id)
        self._engine.audit()
        await until(lambda: self._num_resident() == sum(view.tokens for view in self._engine.list_contexts()))

    def _num_resident(self) -> int:
        return sum(worker.tokens for worker in self._engine.cluster().workers)


async def until(holds: Callable[[], bool]) -> None:
    """Returns once `holds`: the cause is on the other side of a socket."""
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)


def _serialize(request: Message | bytes) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


async def _upload(call: Call) -> AsyncIterator[Message | bytes]:
    for request in call.requests:
        yield request
    if call.is_torn:
        raise ConnectionError("the upload breaks off here")


def check_refusal(call: Call, error: grpc.aio.AioRpcError | None) -> None:
    """A refused call must name the fault and the field, and must never blame the service."""
    if error is None or (error.code() == grpc.StatusCode.CANCELLED and call.is_torn):
        return
    if call.method.client_streaming and error.details() == LOST_STATUS:
        return
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and call.timeout is not None:
        return
    assert error.code() in REFUSALS, f"{call}: {error.code()} {error.details()}"
    trailers: dict[Any, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
    status = status_pb2.Status.FromString(trailers[DETAILS_KEY])
    assert status.details, f"{call}: {error.code()} {error.details()}"
    if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
        bad = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(bad)
        assert all(violation.field and violation.description for violation in bad.field_violations)


def small_config(model: str) -> EngineConfig:
    """Few and small blocks, so that requests come to their limits quickly."""
    return EngineConfig(
        model=model, world_size=2, chunk_size=32, block_size=4, replicate_below=8, max_sequences=4, max_waiting=4
    )


async def stay(_: bool) -> Draining:
    """Ignores shutdown signals while the service is being fuzzed."""
    return Draining(open_calls=0, limit=0.0)


class UndrainableService(Service):
    """A service that continues after a drain."""

    async def on_drain_call(self, wait: bool) -> Draining:
        return await stay(wait)


@asynccontextmanager
async def fuzzed(folder: Path) -> AsyncIterator[Target]:
    """The real engine and servicers on fake ranks."""
    tokenizer = load_tokenizer(write_model(folder))
    vocabulary = byte_tokenizer().get_vocab_size()
    config = small_config(str(folder))
    engine = Engine(FakeRanks(2, num_blocks=48, vocab=vocabulary), config, max_positions=300)
    async with running(engine) as found:
        transfers = transfer_engine_of(packable(vocabulary=vocabulary, name=PINNED))
        application = Application(
            engine, tokenizer, lambda: engine.cluster(ModelInfo(name="fake"), "ray"), transfers=cast(Any, transfers)
        )
        server = GrpcServer(application, drain=stay, reset_slots=int)
        port = await server.start("127.0.0.1", 0)
        target = Target(engine, f"127.0.0.1:{port}", echoes(4, vocabulary))
        try:
            yield target
        finally:
            await target.close()
            await server.stop(None)
            await application.close()
    assert found.loop.cancelled() or found.loop.exception() is None


@asynccontextmanager
async def fuzzed_ranks(folder: Path) -> AsyncIterator[Target]:
    """The whole service, its ranks real processes with a real model."""
    config = msgspec.structs.replace(small_config(str(folder)), kv_bytes=1 << 16)
    service = UndrainableService(ServiceConfig(engine=config, port=0, launcher="local"), LocalFleet(worker_main))
    port = await service.start()
    engine = service._engine
    assert engine is not None
    target = Target(engine, f"127.0.0.1:{port}", await generate(engine, 4))
    try:
        yield target
    finally:
        await target.close()
        await service.stop()


async def generate(engine: Engine, count: int) -> list[int]:
    """The engine's greedy answer to PLAIN."""
    prompt = Prompt(context=None, token_ids=PLAIN, sampling=SamplingParams(max_tokens=count))
    async with engine.submit(prompt) as stream:
        return [i async for event in stream if isinstance(event, Tokens) for i in event.token_ids]


def echoes(count: int, vocabulary: int) -> list[int]:
    """The answer of fake ranks to PLAIN."""
    output: list[int] = []
    for index in range(count):
        output.append(echo_token((output or PLAIN)[-1], index, vocabulary))
    return output
