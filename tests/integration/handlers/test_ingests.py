"""Ingests whose clients disconnect, lose the connection or time out, over real sockets with a real engine: all their
resources are free before the next step."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.engine.engine import Engine
from coordinator.engine_messages import Prompt
from longleaf.client import AsyncClient
from longleaf.errors import DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from longleaf.sampling import Sampling
from longleaf.types import Context
from tests.support.gated import GatedRanks, comes_to, serving
from tests.support.network.proxy import Proxy, breaking

pytestmark = pytest.mark.timeout(60)

CHUNK = 64
DOCUMENT = tuple(range(100)) * 6
"""Tokens of 150 blocks; there are 256."""


class Service:
    """A service, a client behind a connection that can be broken, and a client with a direct connection: a call too
    soon after a break may still use the broken one."""

    def __init__(self, ranks: GatedRanks, engine: Engine, proxy: Proxy, far: AsyncClient, near: AsyncClient) -> None:
        self.ranks, self.engine, self.proxy, self.far, self.client = ranks, engine, proxy, far, near

    @property
    def num_jobs(self) -> int:
        cluster = self.engine.cluster()
        return cluster.running + cluster.waiting

    @property
    def num_used_tokens(self) -> int:
        """Tokens."""
        return sum(worker.tokens for worker in self.engine.cluster().workers)

    def start(self, timeout: float | None = None) -> asyncio.Task[Context]:
        return asyncio.create_task(self.far.ingest("doc", DOCUMENT, timeout=timeout))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    ranks = GatedRanks()
    async with AsyncExitStack() as stack:
        engine, address = await stack.enter_async_context(serving(ranks, tmp_path, chunk_size=CHUNK))
        proxy, proxied = await stack.enter_async_context(breaking(address))
        clients = [await stack.enter_async_context(AsyncClient(to, retries=0)) for to in (proxied, address)]
        yield Service(ranks, engine, proxy, *clients)


async def cancel(service: Service, ingest: asyncio.Task[Context]) -> None:
    ingest.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ingest


async def break_off(service: Service, ingest: asyncio.Task[Context]) -> None:
    service.proxy.drop()
    with pytest.raises(Unavailable):
        await ingest


async def pass_the_deadline(service: Service, ingest: asyncio.Task[Context]) -> None:
    with pytest.raises(DeadlineExceeded):
        await ingest


LEAVE = pytest.mark.parametrize("leave", [cancel, break_off, pass_the_deadline])
Leave = Callable[[Service, asyncio.Task[Context]], asyncio.Future[None]]


def patience(leave: Leave) -> float | None:
    return 1.0 if leave is pass_the_deadline else None


async def or_end(state: asyncio.Future[None] | asyncio.Task[None], ingest: asyncio.Task[Context]) -> None:
    """Waits for the state, or for the end of an ingest that passed its deadline on a slow machine."""
    await asyncio.wait([state, ingest], return_when=asyncio.FIRST_COMPLETED)
    state.cancel()


@LEAVE
async def test_disconnected_running_ingest_releases_everything(service: Service, leave: Leave) -> None:
    service.ranks.allow(2)
    ingest = service.start(patience(leave))
    reading = comes_to(service.engine, lambda: service.num_used_tokens >= 3 * CHUNK)
    await or_end(asyncio.ensure_future(reading), ingest)
    await leave(service, ingest)
    await comes_to(service.engine, lambda: not service.num_jobs)  # the third step is running and does not finish
    service.engine.audit()
    assert service.num_used_tokens == 0
    assert len(service.ranks.plans) == 2
    with pytest.raises(NotFound):
        await service.client.get_context("doc")
    service.ranks.allow(100)
    assert (await service.client.ingest("doc", DOCUMENT)).tokens == len(DOCUMENT)


@LEAVE
async def test_disconnected_queued_ingest_leaves_the_queue(service: Service, leave: Leave) -> None:
    sampling = Sampling(max_tokens=230)
    answers = [service.engine.submit(Prompt(context=None, token_ids=(1, 2), sampling=sampling)) for _ in range(4)]
    ingest = service.start(patience(leave))
    waiting = comes_to(service.engine, lambda: service.engine.cluster().waiting == 1)
    await or_end(asyncio.ensure_future(waiting), ingest)
    assert service.engine.cluster().running == 4
    await leave(service, ingest)
    await comes_to(service.engine, lambda: not service.engine.cluster().waiting)
    service.engine.audit()
    service.ranks.allow(1000)
    for answer in answers:
        async for _ in answer:
            pass
    assert service.num_used_tokens == 0


async def test_infeasible_deadline_is_refused_immediately(tmp_path: Path) -> None:
    ranks = GatedRanks(seconds_per_token=1.0)
    ranks.allow(100)
    async with serving(ranks, tmp_path, chunk_size=CHUNK) as (engine, address), AsyncClient(address) as client:
        await client.ingest("first", DOCUMENT[:CHUNK])
        with pytest.raises(
            DeadlineExceeded, match=r"(4 min \d+ s|5 min( 1 s)?) are left, and at least 6 min 40 s are needed"
        ):
            await client.ingest("second", DOCUMENT[:400], timeout=300)
        engine.audit()
        assert (len(ranks.plans), [context.id for context in engine.list_contexts()]) == (1, ["first"])
        assert (await client.ingest("second", DOCUMENT[:200], timeout=300)).tokens == 200


@pytest.mark.parametrize("upload_id", ["", "mine"])
async def test_ingest_past_its_context_expiry_releases_everything(service: Service, upload_id: str) -> None:
    service.ranks.allow(2)
    with pytest.raises(InvalidArgument) as caught:
        await service.client.ingest("doc", DOCUMENT, expires=time.time() + 0.5, upload_id=upload_id)
    assert caught.value.field == "config.expire_time"
    assert not service.num_jobs
    service.engine.audit()
    assert service.num_used_tokens == 0
    service.ranks.allow(100)
    assert (await service.client.ingest("doc", DOCUMENT, upload_id=upload_id)).tokens == len(DOCUMENT)


async def test_resumable_ingest_survives_its_deadline(service: Service) -> None:
    with pytest.raises(DeadlineExceeded):
        await service.client.ingest("doc", DOCUMENT, upload_id="mine", timeout=0.5)
    service.ranks.allow(100)
    assert (await service.client.ingest("doc", DOCUMENT, upload_id="mine")).tokens == len(DOCUMENT)
    assert sum(plan.num_tokens for plan in service.ranks.plans) == len(DOCUMENT)
