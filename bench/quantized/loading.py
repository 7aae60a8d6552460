"""Time of loading quantized weights against that of weights in bfloat16, from files in the page cache."""

import gc
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from bench.durable.options import Row
from bench.harness.arguments import log
from bench.quantized.checkpoints import PLAIN, make_pair
from workers.model import model as models


def measure(layout: str, repeats: int) -> Row:
    """Both sides take turns on one thread, in elapsed time and in processor time, which other programs hardly change.
    The time includes the preflight, in which a model in bfloat16 reads its weights from the memory map for the first
    time. The first turn is not counted.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        plain, own, num_parameters = make_pair(Path(folder), layout)
        sides = {PLAIN: plain, layout: own}
        for path in sides.values():
            (path / "model.safetensors").read_bytes()
        times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for turn in range(repeats + 1):
            order = list(sides) if turn % 2 else list(sides)[::-1]
            for side in order:
                times[side].append(_seconds(sides[side]))
            log(f"{layout}, turn {turn}: {times[layout][-1]} against {times[PLAIN][-1]} s")
        sizes = [(path / "model.safetensors").stat().st_size for path in sides.values()]
    turns = zip(times[layout][1:], times[PLAIN][1:], strict=True)
    elapsed, used = zip(*([own / other for own, other in zip(*turn, strict=True)] for turn in turns), strict=True)
    return {
        "layout": layout,
        "parameters": num_parameters,
        "bytes_of_plain": round(sizes[1] / sizes[0], 3),
        "processor_seconds": [round(median(each[1] for each in times[side][1:]), 3) for side in sides],
        "elapsed": round(median(elapsed), 3),
        "processors": round(median(used), 3),
        "processors_min": round(min(used), 3),
        "processors_max": round(max(used), 3),
    }


def _seconds(folder: Path) -> tuple[float, float]:
    """Elapsed time, and processor time."""
    began, used = time.perf_counter(), time.process_time()
    loaded = models.load(str(folder), "bfloat16", "cpu")
    seconds = time.perf_counter() - began, time.process_time() - used
    del loaded
    gc.collect()
    return seconds
