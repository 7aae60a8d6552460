"""Loading one share of the weights: bytes held, read and cached, memory, and time."""

import gc
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from bench.durable.options import Row
from bench.harness.arguments import log
from bench.harness.memory import PROCESS, parse
from bench.weights import page_cache
from longleaf.config import apply_environment, rank_environment
from workers.model import model as models
from workers.model.sharded_model import load_share
from workers.model.weight_shares import Share

SAMPLE_SECONDS = 0.001


def measure_bytes(folder: Path, count: int) -> Row:
    """Bytes that ranks hold and read, brought into the page cache, and took as anonymous memory, as the largest over
    shares. Each share is loaded in a separate process, from files that are not in the page cache.
    """
    file = folder / "model.safetensors"
    found = list[Row]()
    for index in range(count):
        page_cache.drop(file)
        share = loaded_apart(folder, index, count)
        share["cached"] = page_cache.cached_bytes(file)
        share["peak_over"] = share["anonymous_peak"] - share["held"] - share["largest"]
        found.append(share)
        log(f"share {index} of {count}: {share}")
    whole = found[0]["whole"]
    return {
        "ranks": count,
        "whole_bytes": whole,
        "held_of_whole": largest_ratio(found, "held", whole),
        "read_of_whole": largest_ratio(found, "read", whole),
        "cached_of_held": round(max(one["cached"] / one["held"] for one in found), 4),
        "anonymous_of_allowed": round(max(one["anonymous_peak"] / (one["held"] + one["largest"]) for one in found), 4),
    }


def largest_ratio(found: list[Row], name: str, whole: int) -> float:
    return round(max(one[name] for one in found) / whole, 4)


def loaded_apart(folder: Path, index: int, count: int) -> Row:
    """The bytes of one share, loaded in a new process whose memory this one samples."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_load, args=(there, str(folder), index, count), daemon=True)
    process.start()
    there.close()
    try:
        here.recv()
        before = peak = anonymous_bytes(process.pid)
        here.send("load")
        while not here.poll(SAMPLE_SECONDS):
            peak = max(peak, anonymous_bytes(process.pid))
        return {**here.recv(), "anonymous_peak": peak - before}
    finally:
        process.kill()
        process.join()


def anonymous_bytes(pid: int | None) -> int:
    """Private and shared memory of a process that no file backs."""
    status = (PROCESS.parent / str(pid) / "status").read_text()
    return parse(status, "RssAnon") + parse(status, "RssShmem")


def _load(there: Connection, folder: str, index: int, count: int) -> None:
    """Main function of the process that loads a share."""
    apply_environment(rank_environment(1))
    torch.set_num_threads(1)
    there.send("ready")
    there.recv()
    found = load_share(folder, "auto", "cpu", Share.even(index, count))
    sizes = [parameter.nbytes for parameter in models.build_on_meta(models.read_config(folder), "auto").parameters()]
    local_bytes = sum(parameter.nbytes for parameter in found.model.module.parameters())
    there.send({"held": local_bytes, "read": found.num_bytes_read, "whole": sum(sizes), "largest": max(sizes)})
    there.recv()


def measure_time(folder: Path, counts: tuple[int, ...], repeats: int) -> Row:
    """Seconds of loading a share, against those of loading the model, in turns, from files in the page cache. Both
    include the preflight, in which a whole model reads its weights from the memory map for the first time.
    """
    torch.set_num_threads(1)
    (folder / "model.safetensors").read_bytes()
    seconds: dict[int, list[float]] = {count: [] for count in (1, *counts)}
    for turn in range(repeats + 1):
        for count, times in seconds.items():
            began = time.perf_counter()
            if count == 1:
                found: object = models.load(str(folder), "auto", "cpu")
            else:
                found = load_share(str(folder), "auto", "cpu", Share.even(turn % count, count))
            times.append(time.perf_counter() - began)
            del found
            gc.collect()
        log(f"turn {turn}: " + ", ".join(f"{times[-1]:.2f} s with {count}" for count, times in seconds.items()))
    whole, *shares = (times[1:] for times in seconds.values())
    ratios = {
        f"share_of_{count}": round(median(own / other for own, other in zip(times, whole, strict=True)), 3)
        for count, times in zip(counts, shares, strict=True)
    }
    return {"whole_seconds": round(median(whole), 3), **ratios}
