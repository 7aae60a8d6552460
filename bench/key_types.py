"""One decode step's attention on one thread over keys of each type that ranks keep them in, and how exact it stays.

All types take turns over the same random keys; the ratio is that of the medians, above 1 where a type is faster than
float32. `error` is the norm of the difference from float32, relative to that of the answer. Rows of fp8 (E4M3), which
no rank uses, have the error only: with a scale for each token and head, and without scales. The answer is rounded to
the type of the keys; `differing` is the share of its elements that differ between 8 ranks and 1. Usage:

    python -m bench.key_types --json
    python -m bench.key_types --keys 65536 --heads 8 32 --repeats 20
    python -m bench.key_types --outliers 30  # one channel of 32 is larger, as in real keys
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.harness.arguments import unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.timing import latency
from longleaf.attention import Partial
from longleaf.attention.masks import Read, Reads
from longleaf.kernels import int8, registry
from longleaf.kernels.backend import Backend, Int8Layer
from longleaf.merge import PartialCodec

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8 = {"fp8 by token": True, "fp8": False}
"""Whether each token and head has a scale."""
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
TARGETS = {"bfloat16": 1.5, "float16": 1.5}
NUM_RANKS = 8
BLOCK = 64
"""Slots that share the scales of 8 bits."""
WARM_UP = 2

Row = dict[str, Any]


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--keys", type=int, default=16_384, help="a multiple of the ranks' blocks")
    parser.add_argument("--heads", type=int, nargs="+", default=(8, 16, 32), help="query heads of the one row")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--outliers", type=float, default=1.0, help="size of one channel of 32, relative to the others")
    parser.add_argument("--repeats", type=int, default=50, help="timed turns of each type")
    options = parser.parse_args()
    if min(options.keys, options.kv_heads, options.head_dim, options.repeats) < 1 or options.keys % (NUM_RANKS * BLOCK):
        parser.error(f"--keys: a multiple of {NUM_RANKS * BLOCK}; the others: at least 1")
    if any(heads < 1 or heads % options.kv_heads for heads in options.heads):
        parser.error(f"--heads: multiples of --kv-heads, {options.kv_heads}")
    torch.set_num_threads(1)
    found = [row for heads in options.heads for row in measure(heads, options)]
    print(json.dumps(found, indent=2) if options.json else "\n".join(map(line, found)))


def measure(heads: int, options: argparse.Namespace) -> Iterator[Row]:
    """A row per type of keys."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, options.kv_heads, options.keys, options.head_dim, generator=generator)
    k[..., ::32] *= options.outliers
    q = torch.randn(1, heads, options.head_dim, generator=generator)
    backend = registry.choose("auto", "cpu", torch.float32)
    steps = {name: partial(over, backend, q.to(dtype), k.to(dtype), v.to(dtype)) for name, dtype in FLOATS.items()}
    steps["int8"] = partial(over_int8, backend, q, quantized(k, v))
    whole = Reads([Read(0, 1, 0, options.keys)])
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP + options.repeats):
        for name, step in steps.items():
            begin = time.perf_counter()
            step(whole)
            times[name].append(time.perf_counter() - begin)
    float32 = median(times["float32"][WARM_UP:])
    exact = steps["float32"](whole).out_THD
    shape: Row = {
        "bench": "key_types",
        "keys": options.keys,
        "heads": heads,
        "kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "outliers": options.outliers,
    }
    for name, is_scaled in FP8.items():
        rounded = over(
            backend, q, rounded_to_fp8(k, is_scaled=is_scaled), rounded_to_fp8(v, is_scaled=is_scaled), whole
        )
        yield {**shape, "type": name, "error": relative_error(rounded.out_THD, exact)}
    for name, taken in times.items():
        yield {
            **shape,
            "type": name,
            "error": relative_error(steps[name](whole).out_THD, exact),
            "threads": 1,
            **latency(taken[WARM_UP:]),
            "ratio": round(float32 / median(taken[WARM_UP:]), 3),
            "target": TARGETS.get(name),
            "differing": round(differing(backend, steps[name], options.keys, FLOATS.get(name, torch.float32)), 5),
            "repeats": options.repeats,
            "machine": describe(),
        }


def over(backend: Backend, q_THD: Tensor, k_KSD: Tensor, v_KSD: Tensor, reads: Reads) -> Partial:
    return backend.attend(q_THD, k_KSD, v_KSD, reads, q_THD.shape[2] ** -0.5)


def over_int8(backend: Backend, q_THD: Tensor, quantized: Int8Layer, reads: Reads) -> Partial:
    return backend.attend_int8(q_THD, quantized, reads, q_THD.shape[2] ** -0.5)


def quantized(k_KSD: Tensor, v_KSD: Tensor) -> Int8Layer:
    """The same keys and values in 8 bits."""
    kv_heads, num_keys, dim = k_KSD.shape
    retained = int8.empty(kv_heads, num_keys // BLOCK, BLOCK, dim)
    int8.write(retained, torch.arange(num_keys), k_KSD, v_KSD)
    return retained


def rounded_to_fp8(numbers_KSD: Tensor, *, is_scaled: bool) -> Tensor:
    """Numbers rounded to E4M3, in float32. Those beyond its range become its largest."""
    scale = numbers_KSD.abs().amax(dim=-1, keepdim=True) / FP8_MAX if is_scaled else torch.ones(())
    return (numbers_KSD / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def relative_error(found: Tensor, exact: Tensor) -> float:
    return round(float((found - exact).norm() / exact.norm()), 5)


def differing(backend: Backend, step: "partial[Partial]", num_keys: int, dtype: torch.dtype) -> float:
    """Share of the elements of the answer that differ between keys on one rank and keys on several."""
    wire, share = PartialCodec(backend), num_keys // NUM_RANKS
    shares = [Reads([Read(0, 1, low, low + share)]) for low in range(0, num_keys, share)]
    merged = wire.fold(torch.stack([wire.pack(step(reads)) for reads in shares])).out_THD
    whole = step(Reads([Read(0, 1, 0, num_keys)])).out_THD
    return (merged.to(dtype) != whole.to(dtype)).float().mean().item()


def line(row: Row) -> str:
    """A row for people."""
    subject = (
        f"{row['keys']:>9,} keys  {row['heads']:>3}/{row['kv_heads']} heads of {row['head_dim']}  {row['type']:12}"
    )
    error = f"  error {row['error']:>7.2%}"
    if "ratio" not in row:
        return subject + error
    return (
        f"{subject}{error} {row['latency_us_median'] / 1e3:>8.2f} ms  {row['ratio']:>6.2f} x float32"
        f"  {row['differing']:>8.2%} differ on {NUM_RANKS} ranks"
    )


if __name__ == "__main__":
    main()
