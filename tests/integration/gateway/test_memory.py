"""Long documents and prompts pass through a gateway without remaining in its memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx2
import psutil
import pytest

from longleaf import codec
from longleaf.launch import gateway_command
from longleaf.service_settings import GatewayConfig
from longleaf.types import Cluster, IngestProgress, ModelInfo, Started
from longleaf.v1 import cluster_service_pb2 as cluster_pb
from longleaf.v1 import cluster_service_pb2_grpc, context_service_pb2_grpc, generation_service_pb2_grpc

NUM_BYTES = 100 << 20
MOST_GROWTH = 64 << 20


class Contexts(context_service_pb2_grpc.ContextServiceServicer):
    """Counts the received data, slowly."""

    num_bytes = 0

    async def IngestContext(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await anext(requests)
        yield codec.encode_ingest_progress(IngestProgress(phase="receiving"))
        async for request in requests:
            self.num_bytes += len(request.text)
            await asyncio.sleep(0.0002)  # a service that is slower than its clients
        yield codec.encode_ingest_progress(IngestProgress(phase="ready", received_bytes=self.num_bytes))


class Clusters(cluster_service_pb2_grpc.ClusterServiceServicer):
    """Has a name."""

    async def GetCluster(self, request: cluster_pb.GetClusterRequest, context: Any) -> Any:
        cluster = Cluster(model=ModelInfo(name="m"), workers=(), world_size=1, epoch=1, launcher="local", merge="auto")
        return codec.encode_cluster(cluster)


@asynccontextmanager
async def gateway(server: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """A gateway in a separate process."""
    command = gateway_command(GatewayConfig(server=server, port=0))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().removeprefix("listening on ").strip()
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def test_document_of_100_mb_uses_little_memory() -> None:
    contexts, server = Contexts(), grpc.aio.server()
    context_service_pb2_grpc.add_ContextServiceServicer_to_server(contexts, server)
    cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(Clusters(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with gateway(f"127.0.0.1:{port}") as (url, process):
        before = most = process.memory_info().rss

        async def document() -> AsyncIterator[bytes]:
            nonlocal most
            for _ in range(NUM_BYTES >> 20):
                yield b"a" * (1 << 20)
                most = max(most, process.memory_info().rss)

        async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
            headers = {"content-type": "text/plain", "upload-length": str(NUM_BYTES)}
            answer = await client.post("/v1/contexts/long", content=document(), headers=headers)
        assert '"ready"' in answer.text and contexts.num_bytes == NUM_BYTES
        assert most - before < MOST_GROWTH, f"{(most - before) >> 20} MiB"
    await server.stop(None)


class Generations(generation_service_pb2_grpc.GenerationServiceServicer):
    """Queues all requests; those in `is_queued` get their position."""

    def __init__(self, is_queued: bool) -> None:
        self._is_queued = is_queued
        self.come = asyncio.Semaphore(0)
        self.num_ids = set[int]()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.num_ids.add(len(request.token_ids.ids))
        if self._is_queued:
            yield codec.encode_event(Started(1, 0, 3))
        self.come.release()
        await asyncio.Event().wait()


NUM_PROMPTS = 12
NUM_IDS = 500_000


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_queued", [True, False])
async def test_queued_prompts_of_ids_use_little_memory(is_queued: bool) -> None:
    """After the service has reported their queue positions, for as many as the queue admits."""
    generations, server = Generations(is_queued), grpc.aio.server()
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(generations, server)
    cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(Clusters(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    body = b'{"model":"m","stream":true,"prompt":[%b1]}' % (b"70001," * (NUM_IDS - 1))
    async with gateway(f"127.0.0.1:{port}") as (url, process), httpx2.AsyncClient(base_url=url, timeout=60) as client:
        assert (await client.get("/healthz")).status_code == 200
        before, asking, num_refused = process.memory_info().rss, list[asyncio.Task[Any]](), 0
        for i in range(NUM_PROMPTS):
            content = body if i % 2 else body.replace(b"true", b"false")
            asking.append(asyncio.create_task(client.post("/v1/completions", content=content)))
            come = asyncio.create_task(generations.come.acquire())
            await asyncio.wait([asking[-1], come], return_when=asyncio.FIRST_COMPLETED)
            if asking[-1].done():
                assert (await asking.pop()).status_code == 503
                num_refused += 1
            come.cancel()
        growth = process.memory_info().rss - before
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
    await server.stop(None)
    assert generations.num_ids == {NUM_IDS}
    assert (num_refused == 0) == is_queued
    assert growth < (MOST_GROWTH if is_queued else 2 * MOST_GROWTH), f"{growth >> 20} MiB"
