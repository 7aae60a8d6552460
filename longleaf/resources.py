"""What this process may use of its machine: memory and processors, within the control groups that it runs in.

A container sees the memory and the processors of the whole machine; its limits are told by its control groups alone
(cgroups, in both versions), each of which is limited by those around it.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

ROOT = Path("/")
MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
MEMORY_USED = ("memory.current", "memory.usage_in_bytes")
GPU_DRIVERS = ("dev/nvidiactl", "dev/kfd", "dev/dxg")
"""Device files of the NVIDIA, AMD and WSL drivers."""
PR_SET_PDEATHSIG = 1
KEPT = ("inactive_file", "active_file", "slab_reclaimable")
"""The part of the used memory that the system gives back when it is asked for."""


class Memory(NamedTuple):
    """Sizes in bytes."""

    total: int
    free: int
    """Now."""


def memory(root: Path = ROOT) -> Memory:
    """What all processes within the narrowest limit may use together. `root` is where the file system begins."""
    machine = psutil.virtual_memory()
    limits = [Memory(machine.total, machine.available)]
    limits += [found for folder in _groups(root, "memory") if (found := _group_memory(folder))]
    return Memory(min(limit.total for limit in limits), min(limit.free for limit in limits))


def num_processors(root: Path = ROOT) -> int:
    """Processors that this process may run on, or the share of them that it may use, in whole ones."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_group_processors(folder) for folder in _groups(root, "cpu"))
    return max(1, int(min([allowed, *(quota for quota in quotas if quota)])))


def has_gpu_driver(root: Path = ROOT) -> bool:
    """Whether a GPU device file exists."""
    return any((root / name).exists() for name in GPU_DRIVERS)


def end_with_parent() -> None:
    """The system kills this process when the thread that started it ends, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def max_files() -> int:
    """How many files and connections this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_files() -> None:
    """Lets this process have as many files and connections open as the system would ever let it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that limit `controller` for this process: its own, and those around it that can be seen."""
    own = dict(_own_groups(root))
    for line in _read(root / "proc/self/mountinfo").splitlines():
        place, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        is_first = kind == "cgroup" and controller in options.split(",")
        path = own.get(controller if is_first else "") if is_first or kind == "cgroup2" else None
        if path is None:
            continue
        shown, mounted = map(PurePosixPath, place.split(" ")[3:5])
        # who sees only a part of the hierarchy that it is not in sees at least what limits that part
        inside = path.relative_to(shown) if path.is_relative_to(shown) and ".." not in path.parts else PurePosixPath()
        top = root / mounted.relative_to("/")
        yield from (top / step for step in (inside, *inside.parents))


def _own_groups(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """By controller, the group that this process is in; the second version has one for all, under no name."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        yield from ((name, PurePosixPath(path)) for name in controllers.split(","))


def _group_memory(folder: Path) -> Memory | None:
    """None without a limit."""
    limits = [int(reported) for name in MEMORY_LIMITS if (reported := _read(folder / name)).isdigit()]
    if not limits:
        return None
    used = max(int(_read(folder / name) or 0) for name in MEMORY_USED)
    stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
    # the first version has the sums over the groups inside under names of their own
    retained = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in KEPT)
    return Memory(min(limits), max(0, min(limits) - max(0, used - retained)))


def _group_processors(folder: Path) -> float | None:
    """None without a limit."""
    reported = _read(folder / "cpu.max").split()
    quota, period = reported or [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    """What the file says; nothing if there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
