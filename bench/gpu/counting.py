"""How often the host asks something of a device, and waits for it, as torch's profiler has it."""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

RANGE = "bench.gpu: what is counted"
PATTERNS = {
    "launches": re.compile(r"(cuda|cu|hip)\w*Launch(Cooperative)?Kernel\w*"),
    "graphs": re.compile(r"(cuda|cu|hip)GraphLaunch\w*"),
    "copies": re.compile(r"(cuda|cu|hip)(Memcpy|Memset)\w*"),
    "waits": re.compile(r"(cuda|cu|hip)(\w*Synchronize\w*|Memcpy(_v\d+)?|Memcpy(DtoH|HtoD)(_v\d+)?)"),
}
"""Calls of the host by their names in CUDA's runtime and driver, and in HIP. Copies that are not asynchronous wait."""


class Counts(NamedTuple):
    """What the host did, and how many kernels ran on the device: those of graphs, too."""

    launches: int
    graphs: int
    copies: int
    waits: int
    kernels: int


def counted(call: Callable[[], object]) -> Counts | None:
    """Counts of a call, which has run before; None where the profiler tells nothing."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as trace:
        with record_function(RANGE):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events: Any = trace.events()
    return tally(events)


def tally(events: Iterable[Any]) -> Counts | None:
    """Counts of the calls that began within the range, and of all kernels: these may end later."""
    found = list(events)
    host = [event for event in found if is_of_host(event)]
    within = next(event.time_range for event in host if event.name == RANGE)
    names = [event.name for event in host if within.start <= event.time_range.start <= within.end]
    calls = {what: sum(bool(pattern.fullmatch(name)) for name in names) for what, pattern in PATTERNS.items()}
    kernels = sum(is_kernel(event) for event in found)
    return Counts(**calls, kernels=kernels) if kernels or any(calls.values()) else None


def is_of_host(event: Any) -> bool:
    return event.device_type.name == "CPU"


def is_kernel(event: Any) -> bool:
    return not is_of_host(event) and not event.name.startswith((RANGE, "Memcpy", "Memset"))
