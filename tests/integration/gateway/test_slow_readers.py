"""Streams through a gateway with readers slower than the source."""

import json
from asyncio import create_subprocess_exec, subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import httpx2
import psutil

from longleaf import codec
from longleaf.launch import gateway_command
from longleaf.service_settings import GatewayConfig
from longleaf.types import Cluster, Delta, Finished, ModelInfo, Started
from longleaf.v1 import cluster_service_pb2_grpc, generation_service_pb2_grpc

NUM_DELTAS = 800
TEXTS = [f"{i:07} " * 8192 for i in range(NUM_DELTAS)]
"""64 KiB each, 50 MiB in total: more than the sockets and flow-control windows in between hold."""
MOST_GROWTH = 24 << 20
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Who?"}], "stream": True}


class Generations(generation_service_pb2_grpc.GenerationServiceServicer):
    """Answers each request with all texts at the reader's speed, and counts them."""

    def __init__(self) -> None:
        self.num_taken = list[int]()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        number = len(self.num_taken)
        self.num_taken.append(0)
        yield codec.encode_event(Started(1, 0))
        for i, text in enumerate(TEXTS):
            yield codec.encode_event(Delta(text=text, token_ids=(1,), index=i))
            self.num_taken[number] += 1
        yield codec.encode_event(Finished(sample=0, reason="length"))


class Clusters(cluster_service_pb2_grpc.ClusterServiceServicer):
    """Has a name."""

    async def GetCluster(self, request: Any, context: Any) -> Any:
        cluster = Cluster(model=ModelInfo(name="m"), workers=(), world_size=1, epoch=1, launcher="local", merge="auto")
        return codec.encode_cluster(cluster)


class GatewayMemory(NamedTuple):
    """A gateway in a separate process."""

    url: str
    process: psutil.Process
    generations: Generations


@asynccontextmanager
async def service() -> AsyncIterator[tuple[str, Generations]]:
    """Returns its address."""
    generations, server = Generations(), grpc.aio.server()
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(generations, server)
    cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(Clusters(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", generations
    finally:
        await server.stop(None)


@asynccontextmanager
async def gateway() -> AsyncIterator[GatewayMemory]:
    async with service() as (address, generations):
        command = gateway_command(GatewayConfig(server=address, port=0))
        process = await create_subprocess_exec(*command, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            url = (await process.stdout.readline()).decode().removeprefix("listening on ").strip()
            yield GatewayMemory(url, psutil.Process(process.pid), generations)
        finally:
            process.terminate()
            await process.wait()


class Texts:
    """Checks that a stream's texts are those that were sent, in order."""

    def __init__(self) -> None:
        self.num_seen = 0

    def see(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            if text := choice["delta"].get("content"):
                assert text == TEXTS[self.num_seen]
                self.num_seen += 1


async def test_slow_reader_delays_no_other_stream_and_gets_everything() -> None:
    async with gateway() as (url, process, generations), httpx2.AsyncClient(base_url=url, timeout=60) as client:
        slow, quick = Texts(), Texts()
        async with client.stream("POST", "/v1/chat/completions", json=REQUEST) as status:
            slow_lines = status.aiter_lines()
            slow.see(await anext(slow_lines))
            before = most = process.memory_info().rss
            async with client.stream("POST", "/v1/chat/completions", json=REQUEST) as stream:
                async for line in stream.aiter_lines():
                    quick.see(line)
                    most = max(most, process.memory_info().rss)
            assert quick.num_seen == NUM_DELTAS
            assert generations.num_taken[0] < NUM_DELTAS == generations.num_taken[1]  # the first stream is blocked
            assert most - before < MOST_GROWTH, f"{(most - before) >> 20} MiB"
            last = ""
            async for line in slow_lines:
                slow.see(line)
                last = line or last
            assert (slow.num_seen, last) == (NUM_DELTAS, "data: [DONE]")
