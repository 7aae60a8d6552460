"""Resource usage of processes before and after many epochs."""

from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

GROWTH = 1.05


class Size(NamedTuple):
    """`memory` is the unshared memory in bytes; the other fields count open files, threads and shared-memory
    segments."""

    memory: int
    files: int
    threads: int
    boards: int


def size_of(pid: int) -> Size:
    process = psutil.Process(pid)
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    boards = len({line.split()[-1] for line in maps if "/dev/shm/longleaf" in line})
    return Size(process.memory_full_info().uss, process.num_fds(), process.num_threads(), boards)


def check_growth(sizes: list[dict[int, Size]], warm_up: int) -> None:
    """Checks that processes present in all samples use no more at the end than after `warm_up` samples. Memory is
    compared by the median over a fifth of the samples, because libraries cache and release some."""
    count = len(sizes) // 5
    for pid in set.intersection(*(set(found) for found in sizes)):
        early, late = ([found[pid] for found in part] for part in (sizes[warm_up:][:count], sizes[-count:]))
        course = [found[pid].memory >> 20 for found in sizes]
        before, after = (median(found.memory for found in part) for part in (early, late))
        assert after <= GROWTH * before, f"{pid}: {course} MB"
        for name in ("files", "threads", "boards"):
            then, now = (max(getattr(found, name) for found in part) for part in (early, late))
            assert now <= then, f"{pid}: {then} {name} became {now}"
