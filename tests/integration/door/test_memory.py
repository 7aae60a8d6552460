"""A long document goes through a door, and not into it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx2
import psutil

from longleaf import codec
from longleaf.messages import Cluster, IngestProgress, ModelInfo
from longleaf.v1 import cluster_service_pb2 as cluster_pb
from longleaf.v1 import cluster_service_pb2_grpc, context_service_pb2_grpc

NUM_BYTES = 100 << 20
MOST_GROWTH = 64 << 20


class Contexts(context_service_pb2_grpc.ContextServiceServicer):
    """Counts what comes, slowly."""

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
        told = Cluster(model=ModelInfo(name="m"), workers=(), world_size=1, epoch=1, launcher="local", merge="auto")
        return codec.encode_cluster(told)


async def test_a_document_of_100_mb_takes_little_memory() -> None:
    contexts, server = Contexts(), grpc.aio.server()
    context_service_pb2_grpc.add_ContextServiceServicer_to_server(contexts, server)
    cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(Clusters(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    command = [sys.executable, "-m", "door", f"--server=127.0.0.1:{port}", "--port=0"]
    door = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert door.stdout is not None
        url = (await door.stdout.readline()).decode().removeprefix("listening on ").strip()
        process, most = psutil.Process(door.pid), 0
        before = process.memory_info().rss

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
    finally:
        door.terminate()
        await door.wait()
        await server.stop(None)
