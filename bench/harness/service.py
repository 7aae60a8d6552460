"""The real service, started as a user would start it and driven over gRPC."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from bench.harness.timing import Decoded
from longleaf.client import Client
from longleaf.config import EngineConfig, Launcher
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.service_settings import ServiceConfig
from longleaf.types import Delta, Finished

START_SECONDS = 600.0


class Service:
    """A client of the service that measures the time of its requests."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def ingest(self, context: str, ids: list[int]) -> float:
        """Ingests token ids as a context; seconds from the call to the acknowledgement."""
        begin = time.perf_counter()
        self._client.ingest(context, tuple(ids))
        return time.perf_counter() - begin

    def delete(self, context: str) -> None:
        self._client.delete_context(context)

    def decode(self, context: str, ids: list[int], num_tokens: int) -> Decoded:
        """Generates greedily after `ids`. Deltas wait for whole characters, so the tokens' times are the service's."""
        return self.decode_together([context], [ids], num_tokens)

    def decode_together(self, contexts: list[str], ids: list[list[int]], num_tokens: int) -> Decoded:
        """The same for a question to each of several contexts, or of one context, all asked at once."""
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(contexts)) as threads:
            found = list(threads.map(self._generate, contexts, ids, [num_tokens] * len(contexts)))
        wall = time.perf_counter() - begin
        token_ids = [token_id for answer, _, _ in found for token_id in answer]
        decode = max(last for _, _, last in found) - min(first for _, first, _ in found)
        return Decoded(token_ids, decode, wall, len(contexts))

    def _generate(self, context: str, ids: list[int], num_tokens: int) -> tuple[list[int], float, float]:
        """The answer, and when its first and its last token were there."""
        begin = time.perf_counter()
        events = list(self._client.generate(ids, context=context, max_tokens=num_tokens, ignore_end_token=True))
        last = events[-1]
        assert isinstance(last, Finished)
        first_token = begin + last.timings.first_token_seconds
        token_ids = [i for event in events if isinstance(event, Delta) for i in event.token_ids]
        return token_ids, first_token, first_token + last.timings.decode_seconds


@contextmanager
def running(model: Path, *, chunk_size: int) -> Iterator[Service]:
    """A service at world size 1 on its own port; it stops at the end of the block."""
    config = EngineConfig(model=str(model), world_size=1, chunk_size=chunk_size, threads_per_rank=1)
    with client_of(None, config, "local") as client:
        yield Service(client)


@contextmanager
def client_of(server: str | None, config: EngineConfig, launcher: Launcher) -> Iterator[Client]:
    """A client of a service: of `server` if it is named, else of one that ends with the block."""
    with hosted(server, config, launcher) as address, Client(address) as client:
        yield client


@contextmanager
def hosted(server: str | None, config: EngineConfig, launcher: Launcher) -> Iterator[str]:
    """The address of a service: `server` if it is named, else one that ends with the block."""
    if server:
        yield server
        return
    command = coordinator_command(ServiceConfig(engine=config, port=0, launcher=launcher))
    with ServiceProcess(command) as process:
        yield process.wait_ready(START_SECONDS)
