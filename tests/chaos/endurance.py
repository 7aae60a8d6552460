"""What a process has, before and after many epochs."""

from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

GROWTH = 1.05


class Size(NamedTuple):
    """`memory` in bytes that no other process shares, and numbers of files, threads and pieces of shared memory."""

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
    """Of the processes that were there all the time: what they have at the end is what they had after `warm_up` looks.
    What a library keeps for the next time comes and goes, so memory is the median of a fifth of all looks."""
    count = len(sizes) // 5
    for pid in set.intersection(*(set(found) for found in sizes)):
        early, late = ([found[pid] for found in part] for part in (sizes[warm_up:][:count], sizes[-count:]))
        course = [found[pid].memory >> 20 for found in sizes]
        before, after = (median(found.memory for found in part) for part in (early, late))
        assert after <= GROWTH * before, f"{pid}: {course} MB"
        for name in ("files", "threads", "boards"):
            then, now = (max(getattr(found, name) for found in part) for part in (early, late))
            assert now <= then, f"{pid}: {then} {name} became {now}"
