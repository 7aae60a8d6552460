"""Measures alternative sizes and kernels for sampling, for attention over keys that rows share, in float32, in 8 bits,
over latents and over short contexts, for the merge of partials, and for the store in 8 bits.

    python3 -m bench.gpu.variants --json > variants.json
    python3 -m bench.gpu.variants --only float32         groups whose name holds this
    python3 -m bench.gpu.variants --list

First every variant is compiled and checked, several processes at a time: attention against float64, tokens against the
operations of fixed shape. Then the groups are timed one after the other, each in its own process, as CUDA graphs.
A variant that fails is reported in a line, and the others continue. The JSON is a list of rows; the rows of the
quickest variants are repeated at the end, with `is_best`; `is_default` marks those that the product uses.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, product, repeat
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from bench.gpu import ground
from bench.gpu.cases import LATENT as LATENT_DIM
from bench.gpu.cases import LATENT_GROUP, VALUES, Attend, Choose, Move, label

SECONDS = 90.0
JOBS = 14
"""Processes that compile at a time."""
REPEATS = 10
TOLERANCES = {"bfloat16": 1.5e-2, "float32": 1e-5, "int8": 4e-3, "latent": 3e-2}
"""Largest difference from float64 of a number, and of an lse relative to it."""
NORMS = {"bfloat16": 1e-2, "float32": 5e-6, "int8": 4e-3, "latent": 1e-2}
"""Norm of the difference of all numbers over that of the numbers."""
CHECKED_KEYS = 9000
Row = dict[str, Any]
SAMPLING = "sampling"
KINDS = ("greedy", "temperature", "top-k and top-p", "top-p", "all settings mixed", "20 logprobs")


class Group(NamedTuple):
    """Cases that the same variants serve."""

    name: str
    cases: Sequence[Attend | Move]
    variants: Sequence[tuple[Any, ...] | dict[str, int]]
    """Fields of `tuning.Tile`, then the remaining ones of `tuning.Tuning`: maximum rows, programs, and minimum keys of
    a piece; then the precision of products or the maximum registers. No fields: the kernel and the sizes of
    `constants`. A dict has the sizes of `kernel` that differ from those of `constants`."""
    item_rows: int = 16
    """Maximum rows of an item."""
    kernel: str = ""
    """The kernel whose sizes differ; empty: attention."""


CONSTANTS: tuple[Any, ...] = ()
SHARED_8 = Group(
    "8 rows that share",
    [Attend("bfloat16", 131072, 8)],
    [CONSTANTS, ("unmasked", 64, 64, 4, 3, None, 2, 128)],
    32,
)
SHARED_64 = Group(
    "64 rows that share",
    [Attend("bfloat16", 131072, 64)],
    [
        CONSTANTS,
        ("unmasked", 64, 64, 4, 3, 64, 2, 128),
        ("unmasked", 128, 64, 8, 3, 128, 1, 128),
        ("unmasked", 128, 128, 8, 2, 128, 1, 128),
        ("unmasked", 128, 64, 8, 4, 128, 1, 128),
    ],
)
FLOAT32 = Group(
    "float32",
    [Attend("float32", 131072)],
    [CONSTANTS, ("unmasked", 16, 32, 4, 3, None, 2, None, "tf32x3")],
)
INT8 = Group(
    "int8",
    [Attend("int8", keys) for keys in (32768, 131072, 1048576)],
    [
        CONSTANTS,
        ("items", 16, 128, 4, 3),
        ("items", 16, 128, 4, 4),
        ("items", 16, 128, 4, 3, None, 2, 256),
        ("items", 16, 128, 4, 2, None, 3, None, 168),
        ("items", 16, 128, 4, 3, None, 3, None, 168),
        ("items", 16, 128, 4, 3, None, 3, None),
    ],
)
ONE_ROW = Group(
    "short contexts",
    [Attend("bfloat16", keys) for keys in (4096, 131072)],
    [CONSTANTS, ("items", 16, 64, 4, 2, None, 2, 128)],
)
INT8_SHARED = Group(
    "in 8 bits, 8 rows that share",
    [Attend("int8", 131072, 8)],
    [CONSTANTS, ("items", 16, 128, 4, 3), ("items", 32, 128, 8, 3, 32), ("items", 32, 128, 8, 2, 32)],
)
LATENT = Group(
    "latents",
    [Attend("latent", 131072)],
    [
        CONSTANTS,
        ("items", 16, 32, 4, 2, None, 2, 256),
        ("items", 16, 32, 4, 3),
        ("items", 16, 64, 8, 2, None, 1),
        ("items", 16, 32, 4, 2, None, 3),
    ],
)
LATENT_SHARED = Group(
    "latents, 8 rows that share",
    [Attend("latent", 131072, 8)],
    [
        CONSTANTS,
        ("items", 64, 32, 8, 2, 64, 2),
        ("items", 64, 32, 8, 3, 64, 1),
        ("items", 64, 64, 8, 2, 64, 1),
        ("items", 32, 32, 8, 2, 32, 2),
    ],
)
FOLD = Group(
    "merges of partials",
    [Attend("bfloat16", 8192), Attend("int8", 131072), Attend("latent", 131072), Attend("latent", 131072, 8)],
    [{}, {"TILE_PARTS": 16}, {"TILE_VALUES": 64}, {"TILE_VALUES": 32, "TILE_PARTS": 64, "num_warps": 2}],
    kernel="fold_items",
)
STORE = Group(
    "stores in 8 bits",
    [Move("store_int8", 4096), Move("store_int8", 1)],
    [
        {},
        {"TILE_TOKENS": 16},
        {"TILE_TOKENS": 32},
        {"TILE_TOKENS": 32, "num_warps": 8},
        {"TILE_TOKENS": 32, "TILE_SCAN": 4096, "num_warps": 8},
        {"TILE_TOKENS": 128, "num_warps": 8},
    ],
    kernel="store_int8",
)
GROUPS = (SHARED_8, SHARED_64, FLOAT32, INT8, INT8_SHARED, LATENT, LATENT_SHARED, ONE_ROW, FOLD, STORE)
SAMPLERS: tuple[dict[str, int], ...] = (
    {},
    {"row_warps": 4},
    {"search_warps": 4},
    {"levels": 512},
)
"""Fields of `workers.sampling.fused.SamplerTuning` that differ from the default."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m bench.gpu.variants"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on the standard output")
    parser.add_argument("--list", action="store_true", help="print the variants, and measure nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="groups whose name holds this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes that compile at a time")
    parser.add_argument("--part", metavar="JSON", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def names() -> list[str]:
    return [SAMPLING, *(group.name for group in GROUPS)]


def name_of(variant: Sequence[Any] | dict[str, int]) -> str:
    """A variant in a line."""
    if isinstance(variant, dict):
        return ", ".join(f"{key} {value}" for key, value in variant.items()) or "default"
    return " ".join("-" if field is None else str(field) for field in variant) or "constants"


def tunings_of(group: Group, variant: Sequence[Any]) -> Any:
    """The table of tunings that launches a variant."""
    from longleaf.kernels.gpu.tuning import Tile, Tuning

    if not variant:
        return {}
    tile, rest = Tile(*variant[:5]), list(variant[5:])
    if len(rest) > 3:
        last = rest.pop()
        tile = tile._replace(precision=last) if isinstance(last, str) else tile._replace(max_registers=last)
    max_rows, programs, min_piece = (*rest, *(None, 2, None)[len(rest) :])
    rows = min(max_rows or group.item_rows, max_rows or 64)
    smaller = Tile("items", 16, 128, 4, 3) if group is INT8_SHARED else None
    tiles = {16: smaller, rows: tile} if smaller and max_rows else {rows: tile}
    return {key_of(group): Tuning(tiles, max_rows, programs or 2, min_piece)}


def key_of(group: Group) -> Any:
    """The entry of the table of tunings that a group's variants replace."""
    import torch

    case = group.cases[0]
    assert isinstance(case, Attend)
    keys = case.keys
    return (torch.bfloat16, LATENT_DIM) if keys == "latent" else (getattr(torch, keys), 128)


def kernels_of(group: Group, variant: Sequence[Any] | dict[str, int]) -> Any:
    """The kernels with a variant's sizes."""
    from longleaf.kernels.gpu.backend import TritonKernels, count_multiprocessors

    if isinstance(variant, dict):
        return TritonKernels(count_multiprocessors(), sizes={group.kernel: variant})
    return TritonKernels(count_multiprocessors(), tunings=tunings_of(group, variant))


def checked(group: Group, number: int, device: str) -> Row:
    """Whether the results of a variant are right."""
    if isinstance(group.cases[0], Move):
        return checked_store(group, number, device)
    return checked_attention(group, number, device)


def checked_store(group: Group, number: int, device: str) -> Row:
    """The number of stored tensors whose bits differ from those of the definition, over tokens that come in parts."""
    import torch

    from longleaf.kernels import int8

    kernels = kernels_of(group, group.variants[number])
    generator = torch.Generator(device).manual_seed(0)
    k, v = (torch.randn(2, 640, 128, generator=generator, device=device).to(torch.bfloat16) for _ in range(2))
    k[:, 300:] *= 4
    slots = torch.arange(640, device=device)
    found, right = (int8.empty(2, 5, 128, 128, device) for _ in range(2))
    for part in (slice(0, 5), slice(5, 350), slice(350, 640)):
        kernels.store_int8(found, slots[part], k[:, part], v[:, part])
        int8.write(right, slots[part], k[:, part], v[:, part])
    num_wrong = sum(not torch.equal(a, b) for a, b in zip(found[:4], right[:4], strict=True))
    return {"error": float(num_wrong), "is_right": num_wrong == 0}


def checked_attention(group: Group, number: int, device: str) -> Row:
    """The difference of a variant from float64, over two ranges of keys whose ends are within tiles."""
    import torch

    from longleaf.attention.masks import Read, Reads
    from longleaf.kernels import int8

    case, kernels = group.cases[0], kernels_of(group, group.variants[number])
    assert isinstance(case, Attend)
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if case.keys in ("int8", "latent") else getattr(torch, case.keys)
    num_kv_heads, num_heads, dim = (1, LATENT_GROUP, LATENT_DIM) if case.keys == "latent" else (8, 32, 128)
    size = (CHECKED_KEYS // 128 + 1) * 128

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    q, k, v = drawn(case.num_rows, num_heads, dim), drawn(num_kv_heads, size, dim), drawn(num_kv_heads, size, dim)
    if case.keys == "latent":
        v = k[..., :VALUES]
    reads = [Read(0, case.num_rows, 7, 3001), Read(0, case.num_rows, 3050, CHECKED_KEYS)]
    scale = 2 * dim**-0.5
    if case.keys == "int8":
        layer = int8.empty(8, size // 128, 128, 128, device)
        kernels.store_int8(layer, torch.arange(size, device=device), k, v)
        found = kernels.attend_int8(q, layer, Reads(reads), scale)
        k, v = int8.read(layer, torch.arange(size, device=device), torch.float32)
    else:
        found = kernels.attend(q, k, v, Reads(reads), scale)
    seen = torch.cat([torch.arange(*read[2:4], device=device) for read in reads])
    q_KRD = q.double().unflatten(1, (num_kv_heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
    scores_KRS = scale * q_KRD @ k[:, seen].double().transpose(1, 2)
    out_KRD = torch.softmax(scores_KRS, 2) @ v[:, seen].double()
    out = out_KRD.unflatten(1, (case.num_rows, -1)).permute(1, 0, 2, 3).flatten(1, 2)
    lse = scores_KRS.logsumexp(2).unflatten(1, (case.num_rows, -1)).permute(1, 0, 2).flatten(1, 2)
    error = max(
        float((found.out_THD - out).abs().max()), float(((found.lse_TH - lse) / lse.abs().clamp(1)).abs().max())
    )
    relative = float((found.out_THD - out).norm() / out.norm())
    is_right = error <= TOLERANCES[case.keys] and relative <= NORMS[case.keys]  # false for NaN
    return {"error": error, "relative_error": relative, "is_right": is_right}


class Sampled:
    """Rows of logits of one kind, and the operations that sample them."""

    def __init__(self, kind: str, device: str) -> None:
        import torch

        from bench.gpu import choosing
        from longleaf.sampling import SamplingParams
        from workers.host_copies import to_device
        from workers.sampling.device_sampler import parameters_of
        from workers.sampling.fixed_shape import kind_of

        torch.manual_seed(1)
        choosing.SAMPLINGS.setdefault("top-p", (SamplingParams(temperature=1.0, top_p=0.95, seed=5),))
        tokens = choosing.Tokens(Choose(kind), device)
        rows = tokens._next_rows()
        self.logits = tokens._logits_RV
        batch = tokens._sampler.batch(rows, self.logits.shape[1])
        numbers = batch.numbers([row.token_index for row in rows])
        self.parameters = parameters_of(to_device(torch.from_numpy(numbers), device))
        self.histories, self.needs = tokens._sampler._histories, kind_of(batch.needs)

    def call(self, variant: dict[str, int] | None) -> Any:
        """The operations of fixed shape, or with a variant the kernels."""
        from workers.sampling import fixed_shape, fused

        arguments = (self.logits, self.parameters, self.histories, self.needs)
        if variant is None:
            return partial(fixed_shape.choose, *arguments)
        return partial(fused.choose, *arguments, tuning=fused.DEFAULT._replace(**variant))


def checked_sampling(kind: str, number: int, device: str) -> Row:
    """Whether the tokens of a variant are those of the operations of fixed shape."""
    import torch

    rows = Sampled(kind, device)
    wanted, found = rows.call(None)(), rows.call(SAMPLERS[number])()
    num_wrong = int((wanted[:, 0] != found[:, 0]).sum())
    far = 0.0
    if wanted.shape[1] > 1:
        columns = slice(1, wanted.shape[1] // 2 + 1)
        far = float((wanted[:, columns] - found[:, columns]).abs().max())
    torch.cuda.synchronize()
    return {"wrong_tokens": num_wrong, "error": far, "is_right": num_wrong == 0 and far < 1e-9}


def timed_attention(group: Group, right: Sequence[int], device: str, end: float) -> Iterator[Row]:
    """The rows of a group's variants."""
    import torch

    from bench.gpu import timing
    from bench.gpu.subjects import Subjects

    bandwidth = timing.copy_bandwidth(device)
    for case in group.cases:
        torch.manual_seed(0)
        subjects = Subjects(kernels_of(group, CONSTANTS), device)
        calls = subjects.calls(case)
        wanted: Any = None
        for number in right:
            row: Row = {"group": group.name, "case": label(case), "variant": name_of(group.variants[number])}
            if time.time() > end:
                yield row | {"left_out": "the time is over"}
                continue
            try:
                # the calls read the backend of their subjects: the same keys serve all variants
                subjects._backend = kernels_of(group, group.variants[number])
                _forget_tables(calls)
                found: Any = [call() for call in calls].pop()
                wanted = found if wanted is None else wanted
                seconds = timing.seconds(timing.captured(calls), REPEATS) / len(calls)
                if isinstance(case, Attend):
                    far = float((found.out_THD - wanted.out_THD).norm() / wanted.out_THD.norm())
                    if not far <= 2 * NORMS[case.keys]:
                        raise RuntimeError(f"differs from the first variant by {far:.1e}")
                    row |= {"tflops": round(case.num_flops / seconds / 1e12, 1), "from_first": far}
                yield row | {
                    "graph_us": round(seconds * 1e6, 2),
                    "share": round(case.num_bytes / seconds / bandwidth, 4),
                    "is_default": name_of(group.variants[number]) == default_of(group),
                }
            except Exception as error:  # any error: the others continue
                yield row | {"failed": _line(error)}
        del calls, subjects, wanted
        torch.cuda.empty_cache()


def _forget_tables(calls: Sequence[Any]) -> None:
    """Drops the work items of earlier variants, whose tables have the same keys."""
    from longleaf.attention.masks import Reads

    for call in calls:
        for cell in call.__closure__ or ():
            if isinstance(cell.cell_contents, Reads):
                cell.cell_contents.cache.clear()


def default_of(group: Group) -> str:
    """The name of the variant that `longleaf.kernels.gpu.tuning` has."""
    from longleaf.kernels.gpu.tuning import HOPPER, NONE

    if group.kernel:
        return name_of({})
    key = key_of(group)
    default = HOPPER.get(key, NONE)
    for variant in group.variants:
        assert not isinstance(variant, dict)
        tuning = tunings_of(group, variant).get(key, NONE)
        is_same = tuning.tiles.items() <= default.tiles.items() and tuning[2:] == default[2:]
        if tuning.tiles and is_same and tuning.max_rows in (None, default.max_rows):
            return name_of(variant)
    return name_of(CONSTANTS)


def timed_sampling(kinds: Sequence[str], right: Sequence[int], device: str, end: float) -> Iterator[Row]:
    """The rows of the kinds of sampling, with the operations of fixed shape first."""
    from bench.gpu import timing

    for kind in kinds:
        rows = Sampled(kind, device)
        for number in (None, *right):
            variant = None if number is None else SAMPLERS[number]
            name = "operations of fixed shape" if variant is None else name_of(variant)
            row: Row = {"group": SAMPLING, "case": label(Choose(kind)), "variant": name}
            if time.time() > end:
                yield row | {"left_out": "the time is over"}
                continue
            try:
                call = rows.call(variant)
                call()
                seconds = timing.seconds(timing.captured([call]), REPEATS)
                yield row | {"graph_us": round(seconds * 1e6, 1), "is_default": variant == {}}
            except Exception as error:  # any error: the others continue
                yield row | {"failed": _line(error)}


def run_part(part: dict[str, Any]) -> None:
    """Runs a part in this process and prints its rows as JSON, a line each."""
    import torch

    device = ground.DEVICE
    torch.cuda.set_device(device)
    groups = {group.name: group for group in GROUPS}
    with torch.inference_mode():
        if part["do"] == "check":
            for number, kind in product(part["numbers"], part.get("kinds", [""])):
                row: Row = {"group": part["group"], "number": number, "kind": kind}
                begin = time.monotonic()
                try:
                    if part["group"] == SAMPLING:
                        row |= checked_sampling(kind, number, device)
                    else:
                        row |= checked(groups[part["group"]], number, device)
                except Exception as error:  # any error: the others continue
                    row |= {"failed": _line(error)}
                print(json.dumps(row | {"seconds": round(time.monotonic() - begin, 1)}), flush=True)
            return
        if part["group"] == SAMPLING:
            rows = timed_sampling(part["kinds"], part["numbers"], device, part["end"])
        else:
            rows = timed_attention(groups[part["group"]], part["numbers"], device, part["end"])
        for row in rows:
            print(json.dumps(row), flush=True)


def parts_to_check(chosen: Sequence[str]) -> list[dict[str, Any]]:
    """The parts that processes check, the longest first."""
    parts: list[dict[str, Any]] = []
    if SAMPLING in chosen:
        parts += [
            {"do": "check", "group": SAMPLING, "kinds": kinds, "numbers": [number]}
            for kinds in (("top-p", "20 logprobs"), ("all settings mixed", "temperature", "greedy"))
            for number in range(len(SAMPLERS))
        ]
    for group in GROUPS:
        if group.name in chosen:
            numbers = range(len(group.variants))
            parts += [{"do": "check", "group": group.name, "numbers": [*numbers[i::3]]} for i in range(3)]
    return parts


def run_apart(part: dict[str, Any], timeout: float, report: Callable[[Row], None]) -> list[Row]:
    """The rows of another process, each of which is passed to `report` at once; the last one has the reason if the
    process failed."""
    command = [sys.executable, "-m", "bench.gpu.variants", "--part", json.dumps(part)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    rows: list[Row] = []
    with TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        timer = threading.Timer(max(1.0, timeout), process.kill)
        timer.start()
        for line in process.stdout or ():
            if line.startswith("{"):
                rows.append(json.loads(line))
                report(rows[-1])
        status = process.wait()
        timer.cancel()
        errors.seek(0)
        reason = errors.read().strip().rpartition("\n")[2]
    if status:
        reason = "no end in time" if status == -signal.SIGKILL else reason
        rows.append({**part, "failed": reason or f"ended with {status}"})
        report(rows[-1])
    return rows


def summary(row: Row) -> str:
    """A row in a line."""
    if "numbers" in row:
        return f"FAILED {row['do']} {row['group']} {row['numbers']}: {row['failed']}"
    if "case" not in row:
        name = SAMPLERS[row["number"]] if row["group"] == SAMPLING else _group(row["group"]).variants[row["number"]]
        result = row.get("failed") or f"{'right' if row['is_right'] else 'WRONG'}, error {row['error']:.1e}"
        wrong = f", {row['wrong_tokens']} tokens differ" if row.get("wrong_tokens") else ""
        what = " ".join(filter(None, (row["group"], row["kind"])))
        return f"check  {what} [{name_of(name)}]: {result}{wrong} ({row['seconds']} s)"
    if "graph_us" not in row:
        return f"time   {row['case']} [{row['variant']}]: {row.get('failed') or row.get('left_out')}"
    share = f", {row['share']:.0%} of a copy" if "share" in row else ""
    share += f", {row['tflops']} TFLOP/s" if "tflops" in row else ""
    default = " (default)" if row["is_default"] else ""
    verb = "best" if row.get("is_best") else "time"
    return f"{verb}   {row['case']} [{row['variant']}]{default}: {row['graph_us']} us{share}"


def _group(name: str) -> Group:
    return next(group for group in GROUPS if group.name == name)


def measured(chosen: Sequence[str], limit: float, jobs: int, report: Callable[[Row], None]) -> list[Row]:
    """The rows of all groups, each of which is passed to `report` at once."""
    begin = time.time()
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda part: run_apart(part, 0.6 * limit, report), parts_to_check(chosen)))
    rows = [row for part in found for row in part]
    log(f"checked after {time.time() - begin:.0f} s")
    for name in chosen:
        checks = [row for row in rows if row["group"] == name and "number" in row]
        wrong = {row["number"] for row in checks if not row.get("is_right")}
        right = sorted({row["number"] for row in checks} - wrong)
        part: dict[str, Any] = {"do": "time", "group": name, "numbers": right, "end": begin + limit}
        if name == SAMPLING:
            part["kinds"] = KINDS
        rows += run_apart(part, begin + limit + 10 - time.time(), report)
    timed = [row for row in rows if "graph_us" in row]
    for case in dict.fromkeys(row["case"] for row in timed):
        best = min((row for row in timed if row["case"] == case), key=lambda row: row["graph_us"])
        rows.append({**best, "is_best": True})
        report(rows[-1])
    return rows


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    chosen = [name for name in names() if options.only in name]
    if options.list:
        for name in chosen:
            variants: Sequence[Any] = SAMPLERS if name == SAMPLING else _group(name).variants
            print("\n".join(f"{name}: {name_of(variant)}" for variant in variants))
        return 0
    if (status := ground.stand()) is not None:
        return status
    if options.part:
        run_part(json.loads(options.part))
        return 0
    lock, separators = threading.Lock(), chain("[", repeat(",\n"))

    def report(row: Row) -> None:
        with lock:
            log(summary(row))
            if options.json:
                print(next(separators), json.dumps({"bench": "gpu variants", **row}), end="", flush=True)

    rows = measured(chosen, options.seconds, options.jobs, report)
    if options.json:
        print("\n]")
    return int(any("failed" in row or row.get("is_right") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
