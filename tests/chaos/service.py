"""A service in separate processes with fault injection, and the checks that must pass after each recovery."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from longleaf.client import AsyncClient
from longleaf.comm.shm_cleanup import FOLDER, ProcessIdentity
from longleaf.config import DataConfig, EngineConfig
from longleaf.errors import NotFound, ResourceExhausted
from longleaf.launch import LISTENING, coordinator_command
from longleaf.service_settings import ServiceConfig
from longleaf.types import Cluster
from tests.chaos.__main__ import ANSWERS
from tests.chaos.load import Wrong, answer, check
from tests.chaos.points import Fault, ask
from tests.chaos.reference import BOOK, CUT, FILLER, FORKED, LONG, VISITOR, Reference
from tests.chaos.snapshots import GRACE_SECONDS, check_snapshots, contents, orphans
from tests.chaos.views import Keys, Look, check_block_tables, check_keys, keys_of
from tests.support.command_line import end

SETTINGS: dict[str, Any] = {
    "world_size": 3,
    "block_size": 16,
    "chunk_size": 256,
    "kv_bytes": 2 << 20,
    "step_timeout": 5.0,
    "step_timeout_per_token": 0.005,
    "heartbeat_timeout": 4.0,
    "max_losses_per_minute": 100_000,
    "max_sequences": 16,
}
HEAL_SECONDS = 150.0
LOOK_SECONDS = 0.05
STOP_SECONDS = 30.0
SHOWN = 6000
"""Length of a log excerpt, in characters."""


class Service:
    """Context manager that always removes all processes."""

    def __init__(self, folder: Path, reference: Reference, **settings: Any) -> None:
        self._folder = folder
        self._log = folder / "log"
        self.config = EngineConfig(model=str(reference.folder), **{**SETTINGS, **settings})
        self.reference = reference
        self._keys: dict[str, Keys] = {}
        self._sizes: list[tuple[int, int, int]] = []
        self._family: list[psutil.Process] = []
        self._started = set[int]()
        """Ids of all processes that have been ranks."""

    async def __aenter__(self) -> "Service":
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        known = [one.tokens for one in (*self.reference.known, *self.reference.drawn)]
        (self._folder / ANSWERS).write_text(json.dumps(known))
        self.client = AsyncClient(f"127.0.0.1:{self._port}", retries=0)
        await self._begin()
        return self

    @property
    def data(self) -> Path:
        """The data folder."""
        return self._folder / "data"

    async def _begin(self) -> None:
        data = DataConfig(data_dir=str(self.data))
        command = coordinator_command(ServiceConfig(engine=self.config, port=self._port, launcher="local", data=data))
        command = [sys.executable, "-m", "tests.chaos", str(self._folder), *command[4:]]
        line = await asyncio.to_thread(self._start, command)
        assert line.startswith(LISTENING), self.log

    def _start(self, command: list[str]) -> str:
        """Returns the first line of output."""
        with self._log.open("a") as log:
            pipes = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
            self.process = subprocess.Popen(command, **pipes, start_new_session=True)
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    async def __aexit__(self, *exception: object) -> None:
        await self.client.close()
        end(self.process)

    @property
    def log(self) -> str:
        return self._log.read_text()[-SHOWN:]

    # --- actions ---

    async def prepare(self) -> None:
        """Ingests the documents and records the keys and answers of the undisturbed service."""
        documents, client = self.reference.documents, self.client
        await client.ingest(LONG, documents[LONG])
        await client.ingest(
            BOOK, documents[BOOK][:CUT]
        )  # with replicated windows a fork can only start where an ingest ended
        await client.ingest(BOOK, documents[BOOK][CUT:], append=True)
        await client.fork_context(BOOK, FORKED, num_tokens=CUT)
        await client.ingest(FORKED, documents[FORKED][CUT:], append=True)
        for one in self.reference.drawn:
            found = await answer(client, one, Counter())
            if found.tokens != one.tokens:
                raise Wrong(f"drawn after {one.context}: {found.tokens} is not {one.tokens}")
            self.reference.known.append(found)
        look = await self._idle()
        pids = await self.pids()
        for name in look.paths:
            self._keys[name] = keys_of(self._folder, look, name, pids)

    async def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        found = [worker.pid for worker in (await self.client.cluster()).workers]
        self._started.update(found)
        return found

    def arm(self, pid: int, fault: Fault | None) -> None:
        ask(self._folder, pid, "arm", fault)

    def arm_coordinator(self, fault: Fault | None) -> None:
        self.arm(self.process.pid, fault)

    def rank_processes(self) -> set[int]:
        """The ids of the processes of ranks, including those that are starting."""
        return {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}

    async def wait_probe(self, pid: int) -> None:
        """Returns when a rank that is starting can be asked."""
        while not (self._folder / str(pid)).exists():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS / 10)

    def record_processes(self) -> None:
        """Records all processes of the service before they end."""
        main = psutil.Process(self.process.pid)
        self._family = [main, *main.children(recursive=True)]

    def kill_processes(self) -> None:
        """Kills all processes; only the data folder remains."""
        for process in self._family:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    async def restart(self) -> None:
        """Starts another service with the same data folder after the first one is dead."""
        await asyncio.to_thread(self.process.wait, STOP_SECONDS)
        left = await asyncio.to_thread(psutil.wait_procs, self._family, STOP_SECONDS)
        assert not left[1], "ranks exit with the coordinator"
        self._sizes.clear()
        self._started.clear()
        await self._begin()
        await self.pids()

    async def load_contexts(self) -> float:
        """Queries every context so that the ranks load it. Returns the largest logprob difference as a share of the
        tolerance."""
        retained = [known for known in self.reference.known if known.context in self._keys]
        return max([check(await answer(self.client, known, Counter()), known) for known in retained])

    @asynccontextmanager
    async def evicting(self) -> AsyncGenerator[None, None]:
        """Creates and deletes large contexts meanwhile, which causes evictions of all others."""
        is_over = asyncio.Event()
        task = asyncio.create_task(self._fill_pool(is_over))
        try:
            yield
        finally:
            is_over.set()
            await task
            for context in await self.client.list_contexts():
                if context.id.startswith(FILLER):
                    await self.client.delete_context(context.id)

    async def _fill_pool(self, is_over: asyncio.Event) -> None:
        document, numbers = self.reference.documents[LONG], count()
        while not is_over.is_set():
            number = next(numbers)
            with suppress(ResourceExhausted):
                await self.client.ingest(f"{FILLER}-{number}", (number % 500 + 3, *document))
            with suppress(NotFound):
                await self.client.delete_context(f"{FILLER}-{number - 2}")

    # --- checks ---

    async def wait_healed(self, gone: set[int], epoch: int) -> Cluster:
        """Returns when the world is complete in this epoch or a later one, without the processes in `gone`."""

        def is_healed(found: Cluster) -> bool:
            pids = {worker.pid for worker in found.workers}
            is_over = found.recovery is None or found.recovery.is_done
            return found.world_size == self.config.world_size and found.epoch >= epoch and is_over and not gone & pids

        found: Cluster | None = None
        try:
            async with asyncio.timeout(HEAL_SECONDS):
                async for found in self._changes():
                    if is_healed(found):
                        break
        except TimeoutError:
            raise AssertionError(f"not healed: {gone} should be gone, epoch {epoch} there: {found}") from None
        assert found is not None
        await self.pids()
        return found

    async def check(self) -> tuple[float, float]:
        """Checks every invariant of an idle service. Returns the largest key difference, and the largest logprob
        difference as a share of the tolerance."""
        for pid in await self.pids():
            self.arm(pid, None)
        self.arm_coordinator(None)
        logits = await self.load_contexts()
        drafting = (await self.client.cluster()).drafting
        assert drafting is not None
        assert 0 < drafting.accepted_tokens < drafting.drafted_tokens, drafting
        keys = await self._check_stored()
        found = await self.client.verify(num_tokens=3 * 16 + 40)
        assert found.passed, found
        self._check_size()
        return keys, logits

    async def _check_stored(self) -> float:
        look, pids = await self._idle(), await self.pids()
        assert sorted(look.paths) == sorted(self._keys)
        check_block_tables(self._folder, look, pids, self.config.block_size)
        check_snapshots(self.data, look)
        return max(
            check_keys(keys_of(self._folder, look, name, pids), wanted, name) for name, wanted in self._keys.items()
        )

    async def _idle(self) -> Look:
        """State of the engine once it has no work and no member is joining."""
        return await asyncio.to_thread(ask, self._folder, self.process.pid, "look")

    def _changes(self) -> AsyncGenerator[Cluster, None]:
        return self.client.watch_cluster(min_interval=LOOK_SECONDS)

    def _check_size(self) -> None:
        """Descriptors, threads, children and shared memory must not grow after the first fault."""
        process = psutil.Process(self.process.pid)
        children = process.children(recursive=True)
        assert all(child.status() != psutil.STATUS_ZOMBIE for child in children), children
        self._sizes.append((process.num_fds(), process.num_threads(), len(children)))
        first = self._sizes[0]
        assert all(now <= then + 2 for now, then in zip(self._sizes[-1], first, strict=True)), self._sizes

    # --- shutdown ---

    async def check_swept(self) -> None:
        """Checks that the next service with the same folder leaves only required objects on storage, and that deleted
        data is erased from the disk."""
        self.record_processes()
        await self.stop()
        await asyncio.sleep(GRACE_SECONDS)
        await self.restart()
        await self.load_contexts()
        look = await self._idle()
        deleted = np.array(self.reference.documents[VISITOR][:40], "<u4").tobytes()
        async with asyncio.timeout(LOOK_SECONDS * 1000):
            while orphans(self.data, look) or deleted in contents(self.data):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)
        check_snapshots(self.data, look)

    async def stop(self) -> None:
        """Stops the service like a user and checks that nothing remains."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.process.wait, STOP_SECONDS + self.config.heartbeat_timeout)
        assert code == 0, self.log
        left = psutil.wait_procs(family, timeout=STOP_SECONDS)[1]
        assert not left, f"{left} are left after {time.monotonic() - began:.0f} s"
        files = [name for name in os.listdir(FOLDER) if is_of(name, self._started)]
        assert not files, files


def is_of(name: str, pids: set[int]) -> bool:
    """Whether one of these processes created a shared-memory file."""
    maker = ProcessIdentity.from_file_name(name)
    return maker is not None and maker.pid in pids
