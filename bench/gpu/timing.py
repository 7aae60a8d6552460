"""Times of what runs on a GPU, by its own events."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

REPEATS = 20
WARM_UP = 3
Call = Callable[[], object]


def captured(calls: Sequence[Call]) -> Call:
    """A graph of the calls, one after the other; to replay it takes the host next to no time. They have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def seconds_of_first(call: Call) -> float:
    """Seconds of the host for a call that has not run before, and may compile."""
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def seconds(call: Call, repeats: int = REPEATS) -> float:
    """Median of the seconds that a call takes, on the device."""
    for _ in range(WARM_UP):
        call()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairs) / 1e3


def copy_bandwidth(device: str, num_bytes: int = 2 << 30) -> float:
    """Bytes per second of a copy on the device, those read and those written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source))
