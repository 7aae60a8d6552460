"""Retried and unretried calls over real sockets."""

import asyncio
import inspect
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.handlers.document_tokenizer import DocumentTokenizer
from coordinator.handlers.uploads import Uploads
from longleaf.client import AsyncClient, Client, Retries, Retry
from longleaf.client.retries import FIRST_LIMIT
from longleaf.errors import (
    AlreadyExists,
    ContextLost,
    DeadlineExceeded,
    InvalidArgument,
    LongleafError,
    NotFound,
    RankLost,
    ResourceExhausted,
    Unavailable,
)
from longleaf.types import Started
from tests.support.network.proxy import breaking
from tests.support.service import Served, collect, ids

FULL = ResourceExhausted("queue", "is full", 0.01)
QUICK = Retries(limit=3, first_delay=0.001)


async def test_slow_connection_is_not_an_error(service: Served) -> None:
    async with breaking(service.address, delay=0.5) as (_, address), AsyncClient(address, retries=0) as client:
        assert await client.list_contexts() == []


class Flaky:
    """An engine error that disappears after `times` retries."""

    def __init__(self, service: Served, error: LongleafError, times: int) -> None:
        self._engine, self._times = service.engine, times
        self.retries: list[Retry] = []
        service.engine.error = error

    def __call__(self, retry: Retry) -> None:
        self.retries.append(retry)
        if len(self.retries) == self._times:
            self._engine.error = None


@pytest.mark.parametrize("has_answered", [True, False])
async def test_service_that_answered_before_is_waited_for(service: Served, has_answered: bool) -> None:
    """A restart takes time; a service that has never answered may not exist."""
    flaky = Flaky(service, Unavailable("it starts"), 2 * FIRST_LIMIT)
    quick = Retries(first_delay=0.001, longest_delay=0.002)
    async with AsyncClient(service.address, retries=quick, on_retry=flaky) as client:
        if has_answered:
            await client.list_contexts()
            await generate(client)
            assert len(flaky.retries) == 2 * FIRST_LIMIT
        else:
            with pytest.raises(Unavailable, match="it starts"):
                await generate(client)
            assert len(flaky.retries) == FIRST_LIMIT


async def generate(client: AsyncClient) -> object:
    return await collect(client.generate("x"))


async def ingest(client: AsyncClient) -> object:
    return await client.ingest("moby", "text")


async def upload(client: AsyncClient) -> object:
    return await client.ingest("moby", "text", upload_id="mine")


async def cluster(client: AsyncClient) -> object:
    return await client.cluster()


async def watch(client: AsyncClient) -> object:
    return await anext(client.watch_cluster())


@pytest.mark.parametrize("error", [FULL, Unavailable("starting"), RankLost(1, "killed")], ids=repr)
@pytest.mark.parametrize("call", [generate, cluster, watch])
async def test_call_that_never_started_is_retried(
    service: Served, call: Callable[[AsyncClient], Any], error: LongleafError
) -> None:
    flaky = Flaky(service, error, 2)
    async with AsyncClient(service.address, retries=QUICK, on_retry=flaky) as client:
        assert await call(client)
    assert [retry.number for retry in flaky.retries] == [1, 2]
    assert all(str(retry.error) == str(error) for retry in flaky.retries)
    assert all(retry.delay >= 0.01 for retry in flaky.retries if isinstance(error, ResourceExhausted))


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("a", "b"),
        NotFound("contexts/a"),
        AlreadyExists("a"),
        ResourceExhausted("pool", "full"),
        ContextLost("contexts/a", "no room"),
    ],
)
async def test_permanent_errors_are_not_retried(service: Served, error: LongleafError) -> None:
    flaky = Flaky(service, error, 1)
    async with AsyncClient(service.address, retries=QUICK, on_retry=flaky) as client:
        with pytest.raises(type(error)):
            await generate(client)
    assert not flaky.retries


@pytest.mark.parametrize("call", [generate, upload])
async def test_recovery_longer_than_the_timeout_is_not_waited_for(
    service: Served, call: Callable[[AsyncClient], Any]
) -> None:
    """A longer timeout waits for the announced time."""
    flaky = Flaky(service, Unavailable("recovering", 0.01), 1)
    async with AsyncClient(service.address, retries=QUICK, on_retry=flaky) as client:
        assert await call(client)
        assert [retry.delay >= 0.01 for retry in flaky.retries] == [True]
        service.engine.error = Unavailable("recovering", 1000.0)
        with pytest.raises(Unavailable, match="recovering") as caught:
            await collect(client.generate("x", timeout=30.0))
    assert caught.value.retry_seconds == 1000.0
    assert len(flaky.retries) == 1


async def test_interrupted_answer_is_not_restarted(service: Served) -> None:
    service.engine.late_error = Unavailable("gone")
    retries: list[Retry] = []
    async with AsyncClient(service.address, retries=QUICK, on_retry=retries.append) as client:
        answer = client.generate("x")
        assert isinstance(await anext(answer), Started)
        with pytest.raises(Unavailable, match="gone"):
            await collect(answer)
    assert not retries
    assert len(service.engine.streams) == 1


async def test_started_upload_is_not_sent_again(service: Served) -> None:
    flaky = Flaky(service, FULL, 1)
    async with AsyncClient(service.address, retries=QUICK, on_retry=flaky) as client:
        with pytest.raises(ResourceExhausted):
            await client.ingest("moby", iter([b"text"]))
    assert not flaky.retries


class Sent:
    """Counts the document bytes that a service receives; refuses once after `refuse_after` of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse_after: int | None = None) -> None:
        self.num_bytes = 0
        self._refuse_after = refuse_after
        receive = DocumentTokenizer.receive

        def count(document: DocumentTokenizer, text: bytes) -> None:
            if self._refuse_after is not None and self.num_bytes >= self._refuse_after:
                self._refuse_after = None
                raise ResourceExhausted("uploads", "hold too much", 0.01)
            receive(document, text)
            self.num_bytes += len(text)

        monkeypatch.setattr(DocumentTokenizer, "receive", count)


def once(*parts: bytes) -> Iterator[bytes]:
    """A document that can be read only once."""
    yield from parts


TEXT = b"call me Ishmael. " * 8


@pytest.mark.parametrize("refuse_after", [None, 34], ids=["at its end", "in its middle"])
@pytest.mark.parametrize("is_plain", [False, True], ids=["async", "plain"])
async def test_durable_upload_is_retried_without_sending_bytes_twice(
    service: Served, monkeypatch: pytest.MonkeyPatch, is_plain: bool, refuse_after: int | None
) -> None:
    monkeypatch.setattr("longleaf.client.documents.PIECE_BYTES", 17)
    sent = Sent(monkeypatch, refuse_after)
    flaky = Flaky(service, FULL, 1 if refuse_after is None else 2)
    document = once(TEXT[:50], TEXT[50:])

    def use() -> int:
        with Client(service.address, retries=QUICK, on_retry=flaky) as client:
            return client.ingest("moby", document, upload_id="mine").tokens

    if is_plain:
        num_tokens = await asyncio.to_thread(use)
    else:
        async with AsyncClient(service.address, retries=QUICK, on_retry=flaky) as client:
            num_tokens = (await client.ingest("moby", document, upload_id="mine")).tokens
    assert num_tokens == 2 + len(TEXT)
    assert service.engine.contexts["moby"][2:] == list(ids(TEXT.decode()))
    assert sent.num_bytes == len(TEXT)
    assert all(retry.delay >= 0.01 for retry in flaky.retries)


async def test_repeatedly_refused_upload_fails(service: Served) -> None:
    service.engine.error = FULL
    retries: list[Retry] = []
    async with AsyncClient(service.address, retries=QUICK, on_retry=retries.append) as client:
        with pytest.raises(ResourceExhausted):
            await client.ingest("moby", TEXT, upload_id="mine")
    assert [retry.number for retry in retries] == [1, 2, 3]


async def test_expired_upload_is_sent_again_from_a_rereadable_source(
    service: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The oldest upload is evicted when others need its space."""
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    monkeypatch.setattr(Uploads, "find", lambda *_: None)
    for number, document in enumerate([TEXT, TEXT.decode(), path, [TEXT[:9], TEXT[9:]]]):
        flaky = Flaky(service, FULL, 1)
        async with AsyncClient(service.address, retries=QUICK, on_retry=flaky) as client:
            await client.ingest(f"moby-{number}", document, upload_id="mine")
        assert service.engine.contexts[f"moby-{number}"][2:] == list(ids(TEXT.decode()))
    service.engine.error = FULL
    async with AsyncClient(service.address, retries=QUICK) as client:
        with pytest.raises(Unavailable, match="has lost acknowledged parts .* cannot be read again"):
            await client.ingest("moby", once(TEXT), upload_id="mine")


async def test_mutation_that_may_have_succeeded_is_not_retried(service: Served, monkeypatch: Any) -> None:
    def fail(context_id: str) -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(service.engine, "delete_context", fail)
    retries: list[Retry] = []
    async with AsyncClient(service.address, retries=QUICK, on_retry=retries.append) as client:
        with pytest.raises(Unavailable):
            await client.delete_context("moby")
    assert not retries


@pytest.mark.parametrize("limit", [0, 2])
async def test_retries_are_limited_and_can_be_disabled(service: Served, limit: int) -> None:
    service.engine.error = FULL
    retries: list[Retry] = []
    async with AsyncClient(service.address, retries=limit, on_retry=retries.append) as client:
        with pytest.raises(ResourceExhausted):
            await generate(client)
    assert len(retries) == limit == len(service.engine.prompts) - 1


async def test_wait_longer_than_the_timeout_is_not_started(service: Served) -> None:
    service.engine.error = ResourceExhausted("queue", "is full", 3600.0)
    async with AsyncClient(service.address) as client:
        with pytest.raises(ResourceExhausted):
            await collect(client.generate("x", timeout=60))
        with pytest.raises(ResourceExhausted):
            await generate(client)
    assert len(service.engine.prompts) == 2


async def test_retries_are_logged(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    service.engine.error = ResourceExhausted("queue", "is full", 0.001)
    async with AsyncClient(service.address, retries=1) as client:
        with pytest.raises(ResourceExhausted):
            await generate(client)
    assert re.search(r"Generate: retry 1 in \d[\d.]* ms: ", caplog.text)
    assert "queue: is full" in caplog.text


async def test_call_ends_at_its_timeout(service: Served) -> None:
    service.engine.is_endless = True
    with pytest.raises(DeadlineExceeded, match="did not answer in time"):
        await collect(service.client.generate("x", timeout=0.2))
    await service.engine.streams[0].closed.wait()
    with pytest.raises(DeadlineExceeded, match="did not answer in time"):
        await service.client.ingest("moby", "text", timeout=0.2)


async def test_ingest_that_ends_during_sending_is_not_a_cancellation(service: Served) -> None:
    """The library cancels a call that ended while it was being sent to: that must not look like a cancelled task."""
    reached = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"text"
        reached.set()
        await asyncio.Event().wait()

    with pytest.raises((Unavailable, DeadlineExceeded)):
        await service.client.ingest("moby", endless(), timeout=0.2)
    assert reached.is_set()


def test_backoff_grows_from_the_delay_of_the_service() -> None:
    retries = Retries(first_delay=1.0, longest_delay=5.0)
    gone = Unavailable("gone")
    assert [retries.delay(number, gone, 1.0) for number in range(1, 6)] == [1, 2, 4, 5, 5]
    assert [retries.delay(number, ResourceExhausted("a", "b", 7.0), 0.5) for number in (1, 2)] == [7.5, 8]
    assert retries.delay(3, gone, 0.0) == 0
    assert retries.delay(5000, gone, 1.0) == 5, "a patient client may retry for hours"


def test_both_clients_have_the_same_methods() -> None:
    def signatures(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
        methods = {name: one for name, one in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}
        return {
            name: [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
            for name, method in methods.items()
        }

    assert signatures(AsyncClient) == signatures(Client)


async def test_synchronous_client_retries(service: Served) -> None:
    flaky = Flaky(service, FULL, 1)

    def use() -> int:
        with Client(service.address, retries=QUICK, on_retry=flaky) as client:
            return len(list(client.generate("x")))

    before = time.monotonic()
    assert await asyncio.to_thread(use) > 0
    assert time.monotonic() - before >= 0.01
    assert len(flaky.retries) == 1
