"""Upper limit of the gain from more processes on this machine: the same arithmetic without service, messages or waits.

Logical cores that are two threads of one core, and memory bandwidth that one of them can use up, give two processes
less than twice the speed of one; no service can gain more than its machine.
"""

import queue
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp

from longleaf.attention.masks import Read
from longleaf.kernels import registry

SECONDS = 1.0
"""How long a process computes in one turn."""
TURNS = 5
HEADS, KV_HEADS, DIM = 4, 2, 64
"""Those of the embedded model."""


@dataclass(frozen=True, slots=True)
class Load:
    """Attention of `rows` query rows over `keys` keys: few rows are bound by memory, many by arithmetic."""

    rows: int
    keys: int

    def speed(self) -> float:
        """How often per second this process computes it."""
        q_THD = torch.randn(self.rows, HEADS, DIM)
        k_KSD, v_KSD = torch.randn(2, KV_HEADS, self.keys, DIM)
        backend, reads, count = registry.choose("auto", "cpu", torch.float32), [Read(0, self.rows, 0, self.keys)], 0
        begin = time.perf_counter()
        while (taken := time.perf_counter() - begin) < SECONDS:
            backend.attend(q_THD, k_KSD, v_KSD, reads, DIM**-0.5)
            count += 1
        return count / taken


DECODE, INGEST = Load(1, 128_000), Load(2048, 4096)


def gain(load: Load, num_processes: int) -> float:
    """Work per second of that many processes over that of one; the median of turns that alternate. Raises RuntimeError
    when one of them dies: the others wait for it for ever."""
    context: Any = mp.get_context("spawn")
    start, speeds = context.Barrier(num_processes), context.Queue()
    workers = [
        context.Process(target=_work, args=(rank, load, start, speeds), daemon=True) for rank in range(num_processes)
    ]
    for worker in workers:
        worker.start()
    try:
        found = [_next(speeds, workers) for _ in range(TURNS * (num_processes + 1))]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    ratios = []
    for turn in range(TURNS):
        alone = next(speed for at, speed, is_alone in found if at == turn and is_alone)
        ratios.append(sum(speed for at, speed, is_alone in found if at == turn and not is_alone) / alone)
    return round(median(ratios), 3)


def _next(speeds: Any, workers: list[Any]) -> tuple[int, float, bool]:
    """The next measured value of the processes. Raises RuntimeError if one of them died instead."""
    while True:
        with suppress(queue.Empty):
            return speeds.get(timeout=SECONDS)
        for rank, worker in enumerate(workers):
            if worker.exitcode:
                raise RuntimeError(f"process {rank} ended with exit code {worker.exitcode}")


def _work(rank: int, load: Load, start: Barrier, speeds: Any) -> None:
    torch.set_num_threads(1)
    for turn in range(TURNS):
        start.wait()
        if rank == 0:
            speeds.put((turn, load.speed(), True))
        start.wait()
        speeds.put((turn, load.speed(), False))
