"""Seconds of loading quantized weights against those of weights in bfloat16, from files in the page cache."""

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
    """Both sides take turns on one thread. The time includes the preflight, in which a model in bfloat16 reads its
    weights from the memory map for the first time. The first turn is not counted.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        plain, own, num_parameters = make_pair(Path(folder), layout)
        sides = {PLAIN: plain, layout: own}
        for path in sides.values():
            (path / "model.safetensors").read_bytes()
        times: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(repeats + 1):
            order = list(sides) if turn % 2 else list(sides)[::-1]
            for side in order:
                times[side].append(_seconds(sides[side]))
            log(f"{layout}, turn {turn}: " + ", ".join(f"{found[-1]:.2f} s in {side}" for side, found in times.items()))
        sizes = [(path / "model.safetensors").stat().st_size for path in sides.values()]
    ratios = [own / other for own, other in zip(times[layout][1:], times[PLAIN][1:], strict=True)]
    return {
        "layout": layout,
        "parameters": num_parameters,
        "bytes_of_plain": round(sizes[1] / sizes[0], 3),
        "plain_seconds": round(median(times[PLAIN][1:]), 3),
        "seconds": round(median(times[layout][1:]), 3),
        "of_plain": round(median(ratios), 3),
        "of_plain_min": round(min(ratios), 3),
        "of_plain_max": round(max(ratios), 3),
    }


def _seconds(folder: Path) -> float:
    began = time.perf_counter()
    loaded = models.load(str(folder), "bfloat16", "cpu")
    seconds = time.perf_counter() - began
    del loaded
    gc.collect()
    return seconds
