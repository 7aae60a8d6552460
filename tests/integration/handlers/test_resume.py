"""Streams that break and are resumed, over real sockets: on a real engine with ranks that answer by arithmetic."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from coordinator.engine.engine import Engine
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf import codec
from longleaf.client import AsyncClient, Client, Retries
from longleaf.codec.status import decode_error
from longleaf.errors import AlreadyExists, Cancelled, DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from longleaf.rank_protocol.step import Decode, StepPlan, StepResult
from longleaf.types import Delta, Event, Finished, GenerateOptions, Resume, Started
from longleaf.v1 import generation_service_pb2 as service_pb
from longleaf.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.support.fakes.echo_model import echo_token
from tests.support.gated import VOCAB, GatedRanks, comes_to, serving
from tests.support.network.proxy import Proxy, breaking
from tests.support.service import FakeEngine, Served, encoded, load_tokenizer, write_model

pytestmark = pytest.mark.timeout(60)

NUM_TOKENS = 200


class Ranks(GatedRanks):
    """Ranks that signal when an answer is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.have_all = asyncio.Event()
        """The last token of an answer was sampled."""

    async def step(self, plan: StepPlan) -> StepResult:
        result = await super().step(plan)
        if isinstance(plan.work, Decode) and plan.work.rows[0].token_index == NUM_TOKENS - 1:
            self.have_all.set()
        return result


class Clock:
    """The engine's clock, which a test may advance."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Resumable:
    """A service on a real engine, and raw calls to it."""

    def __init__(self, ranks: Ranks, engine: Engine, channel: grpc.aio.Channel, address: str, clock: "Clock") -> None:
        self.ranks = ranks
        self.engine = engine
        self.address = address
        self.clock = clock
        self._stub = GenerationServiceStub(channel)

    async def read(
        self, request: service_pb.GenerateRequest, num_tokens: int | None = None, timeout: float | None = None
    ) -> list[Event]:
        """Events until this number of tokens has arrived; then the call is cancelled. Raises typed errors."""
        found: list[Event] = []
        call = self._stub.Generate(request, timeout=timeout)
        try:
            async for response in call:
                found.append(codec.decode_event(response))
                if num_tokens is not None and len(ids_of(found)) >= num_tokens:
                    break
        except grpc.RpcError as error:
            raise decode_error(error, "here") from None
        finally:
            call.cancel()
        return found


def ids_of(found: list[Event]) -> list[int]:
    return [i for event in found if isinstance(event, Delta) for i in event.token_ids]


def request(request_id: str = "one", seconds: float = 60.0, text: str = "x") -> service_pb.GenerateRequest:
    options: GenerateOptions = {"max_tokens": NUM_TOKENS, "ignore_end_token": True, "use_chat_template": False}
    return codec.encode_generate(text, None, options, request_id=request_id, resume_seconds=seconds)


def resume(token_index: int, request_id: str = "one") -> service_pb.GenerateRequest:
    return codec.encode_resume(Resume(request_id, token_index))


@pytest.fixture
async def resumable(tmp_path: Path) -> AsyncIterator[Resumable]:
    ranks, clock = Ranks(), Clock()
    async with serving(ranks, tmp_path, clock) as (engine, address), grpc.aio.insecure_channel(address) as channel:
        yield Resumable(ranks, engine, channel, address, clock)


def expected(tokenizer_ids: tuple[int, ...]) -> list[int]:
    answer, last = [], tokenizer_ids[-1]
    for index in range(NUM_TOKENS):
        last = echo_token(last, index, VOCAB)
        answer.append(last)
    return answer


def plain_ids(folder: Path, text: str) -> tuple[int, ...]:
    return tuple(encoded(Tokenizer.load(folder, DirectRenderer()).plain_encoder(True), text))


async def test_interrupted_stream_resumes_at_the_next_token(resumable: Resumable, tmp_path: Path) -> None:
    resumable.ranks.allow(10**4)
    found = await resumable.read(request(), num_tokens=20)
    assert isinstance(found[0], Started)
    assert found[0].request_id == "one"
    ids = ids_of(found)
    while not isinstance(found[-1], Finished):
        found = await resumable.read(resume(len(ids)), num_tokens=60)
        assert isinstance(found[0], Started)
        deltas = [event for event in found if isinstance(event, Delta)]
        assert not deltas or deltas[0].index == len(ids)
        ids += ids_of(found)
        if not deltas:
            break
    tokenizer = Tokenizer.load(tmp_path, DirectRenderer())
    assert ids == expected(tuple(encoded(tokenizer.plain_encoder(True), "x")))


async def test_sequence_continues_without_a_reader(resumable: Resumable) -> None:
    resumable.ranks.allow(20)
    found = await resumable.read(request(), num_tokens=5)
    resumable.ranks.allow(10**4)
    await resumable.ranks.have_all.wait()
    rest = await resumable.read(resume(len(ids_of(found))))
    assert len(ids_of(found)) + len(ids_of(rest)) == NUM_TOKENS
    assert isinstance(rest[-1], Finished)


async def test_repeated_request_runs_once(resumable: Resumable) -> None:
    resumable.ranks.allow(20)
    first = await resumable.read(request(), num_tokens=5)
    resumable.ranks.allow(10**4)
    again, once_more = await asyncio.gather(resumable.read(request()), resumable.read(request()))
    assert again == once_more
    assert ids_of(again)[: len(ids_of(first))] == ids_of(first)
    assert len({row.sequence for plan in resumable.ranks.plans for row in getattr(plan.work, "rows", ())}) == 1
    with pytest.raises(InvalidArgument) as caught:
        await resumable.read(request(text="another"))
    assert caught.value.field == "request_id"


async def test_unretained_generation_is_not_found(resumable: Resumable) -> None:
    resumable.ranks.allow(10**4)
    await resumable.read(request("never", seconds=0.0))
    for name in ("never", "unknown"):
        with pytest.raises(NotFound, match=f"generations/{name}"):
            await resumable.read(resume(0, name))


async def test_unretained_generation_is_not_run_twice(resumable: Resumable) -> None:
    resumable.ranks.allow(20)
    reading = asyncio.create_task(resumable.read(request("a", seconds=0.0)))
    await resumable.ranks.has_step.wait()
    with pytest.raises(AlreadyExists, match="generations/a"):
        await resumable.read(request("a", seconds=0.0))
    resumable.ranks.allow(10**4)
    assert len(ids_of(await reading)) == NUM_TOKENS


async def test_service_assigns_ids_to_generations_without_one(service: Served) -> None:
    names = [event.request_id async for event in service.client.generate("x") if isinstance(event, Started)]
    names += [event.request_id async for event in service.client.generate("x") if isinstance(event, Started)]
    assert len(set(names)) == 2
    assert all(len(name) == 32 for name in names)


PATIENT = Retries(limit=20, first_delay=0.1, longest_delay=0.2)
OPTIONS: GenerateOptions = {"use_chat_template": False, "max_tokens": NUM_TOKENS, "ignore_end_token": True}


@pytest.mark.parametrize("num_samples", [1, 2])
async def test_client_resumes_automatically_after_a_connection_loss(
    resumable: Resumable, tmp_path: Path, num_samples: int
) -> None:
    found: list[Event] = []
    resumable.ranks.allow(20)
    async with breaking(resumable.address) as (proxy, address), AsyncClient(address, retries=PATIENT) as client:
        breaks = [10, 60]
        async for event in client.generate("x", resumable=True, num_samples=num_samples, **OPTIONS):
            found.append(event)
            if breaks and len(ids_of(found)) >= breaks[0]:
                del breaks[0]
                proxy.drop()
                resumable.ranks.allow(60 if breaks else 10**4)
    ids = [i for event in found if isinstance(event, Delta) and event.sample == 0 for i in event.token_ids]
    assert ids == expected(plain_ids(tmp_path, "x"))
    for sample in range(num_samples):
        deltas = [event for event in found if isinstance(event, Delta) and event.sample == sample]
        starts = [sum(len(other.token_ids) for other in deltas[:n]) for n in range(len(deltas))]
        assert [delta.index for delta in deltas] == starts
    assert sorted(event.sample for event in found if isinstance(event, Finished)) == list(range(num_samples))
    sequences = {row.sequence for plan in resumable.ranks.plans for row in getattr(plan.work, "rows", ())}
    assert len(sequences) == num_samples


async def first_call(resumable: Resumable) -> None:
    """Starts a generation with a deadline, reads part of it, and disconnects. The deadline and the retention of the
    generation then pass, on the engine's clock, once another client reads."""
    resumable.ranks.allow(20)
    async with (
        AsyncClient(resumable.address) as client,
        aclosing(client.generate("x", resumable=True, request_id="one", timeout=500, **OPTIONS)) as answer,
    ):
        async for event in answer:
            if isinstance(event, Delta):
                break


async def test_deadline_of_the_first_call_does_not_apply_to_the_next_reader(
    resumable: Resumable, tmp_path: Path
) -> None:
    await first_call(resumable)
    found: list[Event] = []
    async with breaking(resumable.address) as (proxy, address), AsyncClient(address, retries=PATIENT) as client:
        async for event in client.generate("x", resumable=True, request_id="one", **OPTIONS):
            found.append(event)
            if len(ids_of(found)) >= 10 and not resumable.clock.ahead:
                resumable.clock.ahead = 1000.0
                proxy.drop()
                resumable.ranks.allow(10**4)
    assert ids_of(found) == expected(plain_ids(tmp_path, "x"))
    assert isinstance(found[-1], Finished)


async def test_deadline_of_the_first_synchronous_call_does_not_apply_to_the_next_reader(
    resumable: Resumable, tmp_path: Path
) -> None:
    await first_call(resumable)
    found: list[Event] = []
    loop = asyncio.get_running_loop()

    def release_stream(proxy: Proxy) -> None:
        resumable.clock.ahead = 1000.0
        proxy.drop()
        resumable.ranks.allow(10**4)

    def use(proxy: Proxy, address: str) -> None:
        with Client(address, retries=PATIENT) as client:
            for event in client.generate("x", resumable=True, request_id="one", **OPTIONS):
                found.append(event)
                if len(ids_of(found)) >= 10 and not resumable.clock.ahead:
                    loop.call_soon_threadsafe(release_stream, proxy)

    async with breaking(resumable.address) as (proxy, address):
        await asyncio.to_thread(use, proxy, address)
    assert ids_of(found) == expected(plain_ids(tmp_path, "x"))


async def test_call_past_its_deadline_leaves_the_generation_to_other_readers(resumable: Resumable) -> None:
    resumable.ranks.allow(20)
    first = await resumable.read(request(), num_tokens=5)
    with pytest.raises(DeadlineExceeded):
        await resumable.read(resume(len(ids_of(first))), timeout=0.3)
    assert resumable.engine.cluster().running == 1
    resumable.ranks.allow(10**4)
    assert isinstance((await resumable.read(resume(len(ids_of(first)))))[-1], Finished)


async def test_unread_generation_ends_before_a_distant_deadline(resumable: Resumable) -> None:
    resumable.ranks.allow(20)
    await resumable.read(request(seconds=0.05), num_tokens=5, timeout=1000)
    await comes_to(resumable.engine, lambda: not resumable.engine.cluster().running)
    resumable.engine.audit()
    with pytest.raises(NotFound, match="generations/one"):
        await resumable.read(resume(5))


async def test_generation_that_is_not_resumable_fails(resumable: Resumable) -> None:
    resumable.ranks.allow(20)
    async with breaking(resumable.address) as (proxy, address), AsyncClient(address, retries=PATIENT) as client:
        answer = client.generate("x", **OPTIONS)
        async for event in answer:
            if isinstance(event, Delta):
                break
        proxy.drop()
        with pytest.raises(Unavailable):
            [_ async for _ in answer]


async def test_retained_generation_can_be_cancelled(resumable: Resumable) -> None:
    resumable.ranks.allow(20)
    found = await resumable.read(request(), num_tokens=5)
    async with AsyncClient(resumable.address) as client:
        await client.cancel_generation("one")
        assert resumable.engine.cluster().running == 0
        resumable.engine.audit()
        for name in ("one", "unknown"):
            with pytest.raises(NotFound, match=f"generations/{name}"):
                await client.cancel_generation(name)
    with pytest.raises(NotFound):
        await resumable.read(resume(len(ids_of(found))))
    resumable.ranks.allow(10**4)
    assert len(ids_of(await resumable.read(request()))) == NUM_TOKENS


async def test_readers_of_a_cancelled_generation_are_notified(resumable: Resumable) -> None:
    resumable.ranks.allow(20)
    async with AsyncClient(resumable.address, retries=PATIENT) as client:
        answer = client.generate("x", resumable=True, request_id="one", **OPTIONS)
        async for event in answer:
            if isinstance(event, Delta):
                break
        await client.cancel_generation("one")
        with pytest.raises(Cancelled, match="generations/one"):
            [_ async for _ in answer]


@pytest.mark.parametrize("name", ["", "mine"])
async def test_closing_reader_cancels_the_generation(resumable: Resumable, name: str) -> None:
    resumable.ranks.allow(20)
    async with (
        AsyncClient(resumable.address) as client,
        aclosing(client.generate("x", resumable=True, request_id=name, **OPTIONS)) as answer,
    ):
        async for event in answer:
            if isinstance(event, Delta):
                break
    assert resumable.engine.cluster().running == (1 if name else 0), "only a named generation is resumable"


async def test_generation_ids_are_checked_before_they_are_sent(resumable: Resumable) -> None:
    async with AsyncClient(resumable.address) as client:
        with pytest.raises(InvalidArgument, match="request_id"):
            await anext(client.generate("x", resumable=True, request_id="no such name!", **OPTIONS))


async def test_retained_generation_is_found_through_every_channel(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.is_endless = True
    application = Application(engine, load_tokenizer(write_model(tmp_path)), engine.describe)
    servers = [GrpcServer(application), GrpcServer(application)]
    here, there = [f"127.0.0.1:{await server.start('127.0.0.1', 0)}" for server in servers]
    async with (
        AsyncClient(here) as client,
        AsyncClient(there) as other,
        aclosing(client.generate("x", request_id="held", resumable=True)) as events,
    ):
        assert isinstance(await anext(events), Started)
        await other.cancel_generation("held")
        with pytest.raises(Cancelled, match="generations/held"):
            _ = [event async for event in events]
    for server in servers:
        await server.stop()
    await application.close()
