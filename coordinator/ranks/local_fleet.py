"""A fleet of plain processes on this machine, without Ray."""

import asyncio
import multiprocessing
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess

from coordinator.ranks.ports import OnDeath
from longleaf.channel.rank_spec import Invitation, RankSpec
from longleaf.config import LOOPBACK, EngineConfig, apply_environment, check_slots_here, rank_environment

POLL_SECONDS = 0.5
LEAVE_SECONDS = 3.0
END_SECONDS = 1.0


@contextmanager
def _interrupts_blocked() -> Generator[None, None, None]:
    """A process started in here never sees SIGINT: Ctrl-C reaches the whole terminal, also while it imports."""
    resource_tracker.ensure_running()  # starting it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _enter(variables: dict[str, str], pickled_main: bytes, spec: RankSpec) -> None:
    """First call in a new process. `main` arrives pickled so that its modules, which may import torch, are imported
    only after the environment is complete."""
    apply_environment(variables)
    pickle.loads(pickled_main)(spec)


class LocalFleet:
    """One process per rank, spawned to run `main(spec)`, for instance workers.__main__.main."""

    def __init__(self, main: Callable[[RankSpec], None]) -> None:
        self._main = main
        self._processes: list[SpawnProcess] = []
        self._is_stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    async def reserve(self, config: EngineConfig) -> str:
        check_slots_here(config.world_size)
        return LOOPBACK

    async def launch(self, config: EngineConfig, invitations: Sequence[Invitation], on_death: OnDeath) -> None:
        await asyncio.to_thread(self._launch, config, invitations)
        self._watcher = threading.Thread(target=self._watch, args=(on_death,), name="fleet", daemon=True)
        self._watcher.start()

    def _launch(self, config: EngineConfig, invitations: Sequence[Invitation]) -> None:
        context = multiprocessing.get_context("spawn")
        variables, main = rank_environment(config.threads_per_rank), pickle.dumps(self._main)
        node = socket.gethostname()
        for rank, invitation in enumerate(invitations):
            if self._is_stopping.is_set():
                return
            spec = RankSpec(
                rank=rank,
                config=config,
                invitation=invitation,
                host=LOOPBACK,
                node=node,
                num_ranks_here=config.world_size,
                gpu=rank,
                num_ranks_seeing=config.world_size,
            )
            process = context.Process(target=_enter, args=(variables, main, spec), name=f"rank-{rank}", daemon=True)
            with _interrupts_blocked():
                process.start()
            self._processes.append(process)

    def _watch(self, on_death: OnDeath) -> None:
        alive = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        while alive and not self._is_stopping.is_set():
            for sentinel in wait(list(alive), timeout=POLL_SECONDS):
                assert isinstance(sentinel, int)
                rank = alive.pop(sentinel)
                if not self._is_stopping.is_set():
                    on_death(rank, _describe(self._processes[rank]))

    async def shutdown(self) -> None:
        """Gives ranks that were told to leave a few seconds, then terminates, then kills."""
        self._is_stopping.set()
        await asyncio.to_thread(self._reap)

    def _reap(self) -> None:
        _join_all(self._processes, LEAVE_SECONDS)
        for end in (BaseProcess.terminate, BaseProcess.kill):
            for process in self._processes:
                end(process)
            _join_all(self._processes, END_SECONDS)
        if self._watcher is not None:
            self._watcher.join()
        self._processes.clear()


def _join_all(processes: list[SpawnProcess], seconds: float) -> None:
    """Waits until all have ended, at most `seconds` in all."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))


def _describe(process: SpawnProcess) -> str:
    process.join(timeout=LEAVE_SECONDS)
    code = process.exitcode
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"left with exit code {code}"
