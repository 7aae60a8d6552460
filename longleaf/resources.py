"""Memory and processors available to this process within its control groups.

A container sees the memory and processors of the whole machine. Its limits are only visible in its control groups
(cgroups v1 and v2), each of which is also limited by its parents.
"""

import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
MEMORY_USED = ("memory.current", "memory.usage_in_bytes")
GPU_DRIVERS = ("dev/nvidiactl", "dev/kfd", "dev/dxg")
"""Device files of the NVIDIA, AMD and WSL drivers."""
PR_SET_PDEATHSIG = 1
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""The part of the used memory that the kernel can reclaim."""


class Memory(NamedTuple):
    """Sizes in bytes."""

    total: int
    free: int
    """Now."""


def memory(root: Path = ROOT) -> Memory:
    """Memory for all processes within the narrowest limit. `root` is the root of the file system."""
    import psutil  # clients import this module and do not have it

    machine = psutil.virtual_memory()
    limits = [Memory(machine.total, machine.available)]
    limits += [found for folder in _groups(root, "memory") if (found := _group_memory(folder))]
    return Memory(min(limit.total for limit in limits), min(limit.free for limit in limits))


def num_processors(root: Path = ROOT) -> int:
    """Processors that this process may run on, limited by its CPU quota, as an integer."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_group_processors(folder) for folder in _groups(root, "cpu"))
    return max(1, int(min([allowed, *(quota for quota in quotas if quota)])))


def has_gpu_driver(root: Path = ROOT) -> bool:
    """Whether a GPU device file exists."""
    return any((root / name).exists() for name in GPU_DRIVERS)


def num_gpus(root: Path = ROOT) -> int:
    """GPUs that this process may use, without asking a driver. A driver without device files of NVIDIA counts as one
    GPU."""
    found = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in (root / "dev").iterdir())
    found = found or int(has_gpu_driver(root))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    named = list(takewhile(lambda name: name and name != "-1", (name.strip() for name in visible.split(","))))
    return min(found, len(named))


def gpu_memory(root: Path = ROOT) -> list[int]:
    """The memory of each GPU of this machine in bytes, from the drivers of NVIDIA and AMD; empty if it is unknown."""
    return _nvidia_memory() or [
        int(text)
        for path in sorted(root.glob("sys/class/drm/card*/device/mem_info_vram_total"))
        if (text := _read(path))
    ]


def _nvidia_memory() -> list[int]:
    """From the management library of the driver (NVML), which needs no context on the GPUs."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2():
        return []
    try:
        count, found = ctypes.c_uint(), list[int]()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        for index in range(count.value):
            device, sizes = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) or library.nvmlDeviceGetMemoryInfo(
                device, ctypes.byref(sizes)
            ):
                return []
            found.append(sizes[0])
        return found
    finally:
        library.nvmlShutdown()


def slot_memory(num_ranks: int, *, has_gpu: bool) -> int | None:
    """Bytes of the memory of each of `num_ranks` ranks of this machine: an equal part of the available memory, or with
    `has_gpu` the memory of the smallest GPU. None if it is unknown.
    """
    if has_gpu:
        return min(gpu_memory(), default=None)
    return memory().free // num_ranks


def end_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def max_files() -> int:
    """Limit of open files and connections of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_files() -> None:
    """Raises the soft limit of open files to the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that limit `controller` for this process: its own group and the visible parents."""
    own = dict(_own_groups(root))
    for line in _read(root / "proc/self/mountinfo").splitlines():
        place, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        is_first = kind == "cgroup" and controller in options.split(",")
        path = own.get(controller if is_first else "") if is_first or kind == "cgroup2" else None
        if path is None:
            continue
        shown, mounted = map(PurePosixPath, place.split(" ")[3:5])
        # A process outside the visible part of the hierarchy still sees the limits of that part.
        inside = path.relative_to(shown) if path.is_relative_to(shown) and ".." not in path.parts else PurePosixPath()
        top = root / mounted.relative_to("/")
        yield from (top / step for step in (inside, *inside.parents))


def _own_groups(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """The group of this process by controller; cgroups v2 has one for all, with an empty name."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        yield from ((name, PurePosixPath(path)) for name in controllers.split(","))


def _group_memory(folder: Path) -> Memory | None:
    """None without a limit."""
    limits = [int(text) for name in MEMORY_LIMITS if (text := _read(folder / name)).isdigit()]
    if not limits:
        return None
    used = max(int(_read(folder / name) or 0) for name in MEMORY_USED)
    stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
    # cgroups v1 names the sums over child groups differently
    retained = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in RECLAIMABLE)
    return Memory(min(limits), max(0, min(limits) - max(0, used - retained)))


def _group_processors(folder: Path) -> float | None:
    """None without a limit."""
    fields = _read(folder / "cpu.max").split()
    quota, period = fields or [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    """Contents of the file; empty if it does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
