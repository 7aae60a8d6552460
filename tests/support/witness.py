"""Observes the effects of a rank loss: clients in a separate process, on the service's host.

One client sends requests repeatedly, others watch the cluster and the service's health; all responses are printed.
Failed requests are not retried, so that every error is visible. Usage: python -P witness.py ADDRESS
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from longleaf.client import AsyncClient
from longleaf.types import Delta

CONTEXT = "witness"
DOCUMENT = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money. " * 12
MAX_TOKENS = 150
BEGUN = 10
"""The number of tokens after which an answer is reported as running."""
SECONDS = 120.0
"""Timeout of a test for an expected message."""


class Witness:
    """The process, to be entered once the service is ready; `before` becomes the command that follows it.

    `expected` is the answer while nothing happened.
    """

    def __init__(self, address: str, before: tuple[str, ...] = ()) -> None:
        self._command = [*before, sys.executable, "-P", str(Path(__file__).resolve()), address]
        self.told: list[dict[str, Any]] = []
        """All that was read so far."""
        self.expected: list[int] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.expected = self.until(lambda reported: "answer" in reported)["answer"]
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()

    def until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Reads until a report satisfies the condition, and returns it."""
        deadline = time.monotonic() + SECONDS
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.told.append(json.loads(line))
            assert "error" not in self.told[-1], self.told[-1]
            if is_so(self.told[-1]):
                return self.told[-1]
            assert time.monotonic() < deadline, self.told[-5:]
        raise AssertionError(f"the clients have left: {self.told[-5:]}")

    def under_way(self) -> None:
        """Waits until an answer is."""
        self.until(lambda reported: "begun" in reported)

    def cluster(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Waits until WatchCluster reports a state that satisfies the condition."""
        return self.until(lambda reported: "cluster" in reported and is_so(reported["cluster"]))["cluster"]

    def healed(self, world_size: int, num_losses: int) -> dict[str, Any]:
        """Waits until there are as many ranks again, all that was lost is held, and runs have moved to those that are
        new; the cluster as it is then."""

        def is_so(found: dict[str, Any]) -> bool:
            has_all = found["world_size"] == world_size and len(found["losses"]) >= num_losses
            is_filled = all(loss["slot"] == "filled" for loss in found["losses"])
            shares = [worker["tokens"] for worker in found["workers"]]
            return has_all and is_filled and found["recovery"]["is_over"] and min(shares) > 0

        return self.cluster(is_so)

    def check(self) -> None:
        """Ends the clients. Every answer was that of an undisturbed service, and its health never in doubt."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        self.told += map(json.loads, self._process.stdout)
        assert self._process.wait(timeout=SECONDS) == 0
        assert [reported for reported in self.told if "error" in reported] == []
        assert all(reported["answer"] == self.expected for reported in self.told if "answer" in reported)
        assert {reported["health"] for reported in self.told if "health" in reported} == {"SERVING"}


# --- the process ---


def report(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def ask(client: AsyncClient) -> None:
    ids = list[int]()
    async for event in client.ask(CONTEXT, "Who?", max_tokens=MAX_TOKENS, ignore_end_token=True, temperature=0.0):
        if isinstance(event, Delta):
            assert event.index == len(ids), "a gap, or a repetition"
            had_begun = len(ids) >= BEGUN
            ids += event.token_ids
            if len(ids) >= BEGUN and not had_begun:
                report(begun=len(ids))
    report(answer=ids)


async def watch(client: AsyncClient) -> None:
    async for found in client.watch_cluster(min_interval=0.01):
        report(at=time.time(), cluster=msgspec.to_builtins(found))


async def watch_health(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="")):
            report(health=health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def main(address: str) -> None:
    """Asks until standard input ends."""
    async with AsyncClient(address, retries=0) as client:
        await client.ingest(CONTEXT, DOCUMENT)
        end = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        watching = [asyncio.create_task(watch(client)), asyncio.create_task(watch_health(address))]
        while not end.done():
            await ask(client)
        for task in watching:
            assert not task.done()
            task.cancel()
        await asyncio.wait(watching)


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1]))
    except Exception as _error:
        report(error=repr(_error))
        raise
