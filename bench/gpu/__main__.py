"""Command line of the measurements on a GPU, see `bench.gpu`."""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu import ground
from bench.gpu.cases import Attend, Case, Choose, KernelCase, Move, Prefill, Share, Step, cases, label
from bench.gpu.table import page

if TYPE_CHECKING:
    import torch

    from bench.gpu.subjects import Subjects
    from longleaf.kernels.backend import Backend

SECONDS = 540.0
SUMMARIES = {"graph_us": " us", "captured_ms": " ms", "captured_us": " us", "tokens_per_s": " tokens/s"}
NOT_MEASURED = ("left_out", "failed")
Row = dict[str, Any]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--list", action="store_true", help="say what is measured, and measure nothing")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of rows that --json printed")
    parser.add_argument(
        "--more", type=Path, action="append", default=[], metavar="FILE",
        help="with --table: rows of another run, for cases that FILE did not measure and that --only selects; with "
        "--json, print all rows as JSON instead",
    )  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose line, as --list has it, holds this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after so many no further case is begun")
    return parser.parse_args(arguments)


def chosen(text: str) -> list[Case]:
    return [case for case in cases() if text in label(case)]


def measured(wanted: Sequence[Case], limit: float, clock: Callable[[], float]) -> Iterator[Row]:
    """A row for each case until the time limit; omitted cases are reported."""
    import torch

    from bench.gpu import machine, timing

    begin, device = clock(), ground.DEVICE
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    bandwidth = timing.copy_bandwidth(device)
    backends = load()
    head = {"bench": "gpu", "copy_gb_per_s": round(bandwidth / 1e9, 1)}
    runs = [(case, name) for case in wanted for name in backends if name == "triton" or isinstance(case, Prefill)]
    for turn, (case, name) in enumerate(runs):
        if clock() - begin > limit:
            tell(f"{limit:.0f} s are over: {len(runs) - turn} measurements are left out, from: {label(case)}")
            return
        row = attempted(case, partial(row_of, case, name, backends[name], device, bandwidth))
        gc.collect()
        torch.cuda.empty_cache()
        tell(f"  {label(case)}: {summary(row)}")
        yield {**head, **row, "machine": machine.describe(device)}


def attempted(case: Case, measure: Callable[[], Row]) -> Row:
    """The row of a case. One that was not measured has the reason, so that the others are: `left_out` where something
    is not there or does not fit, `failed` where something is wrong."""
    import torch

    row: Row = {"case": case.name, "what": label(case), **case._asdict()}
    try:
        return row | measure()
    except ground.LeftOut as reason:
        return row | {"left_out": str(reason)}
    except torch.OutOfMemoryError as error:
        return row | {"left_out": f"does not fit: {first_line(error)}"}
    except Exception as error:  # any error
        tell(traceback.format_exc())
        return row | {"failed": f"{type(error).__name__}: {first_line(error)}"}


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def row_of(case: Case, name: str, backend: "Backend", device: str, bandwidth: float) -> Row:
    """The measurements of a case. Raises LeftOut if a dependency is missing."""
    match case:
        case Step():
            ground.need(ground.NEEDED_BY_RANKS)
            from bench.gpu.steps import Steps

            return Steps(device).measure(case, bandwidth)
        case Choose():
            ground.need(ground.NEEDED_BY_RANKS)
            from bench.gpu import choosing

            return choosing.measure(case, device)
        case Share():
            ground.need(ground.NEEDED_BY_RANKS)
            from bench.gpu import ranks, sharing

            return sharing.measure(case, device, ranks.SMALL)
        case Attend() | Move() | Prefill():
            from bench.gpu.subjects import Subjects

            return {"kernels": name, **timed(Subjects(backend, device), case, bandwidth)}


def summary(row: Row) -> str:
    """The number of a row that people wait for."""
    for name, unit in SUMMARIES.items():
        if name in row:
            return f"{row[name]}{unit}"
    return next(f"{why.replace('_', ' ')}: {row[why]}" for why in NOT_MEASURED if why in row)


def load() -> "dict[str, Backend]":
    """The backends of the current GPU by name: Triton's kernels, and those with each source of flash kernels for many
    rows."""
    from longleaf.kernels.gpu.backend import TritonKernels, count_multiprocessors

    found: dict[str, Backend] = {"triton": TritonKernels.load()}
    try:
        from longleaf.kernels.gpu.flash import right_ones

        right, reasons = right_ones(count_multiprocessors(), torch_device())
        found |= {f"flash, {name}": kernels for name, kernels in right.items()}
    except (ImportError, RuntimeError) as error:
        reasons = [str(error)]
    for reason in reasons:
        tell(f"no flash kernels of {reason}")
    return found


def torch_device() -> "torch.device":
    import torch

    return torch.device(ground.DEVICE)


def timed(subjects: "Subjects", case: KernelCase, bandwidth: float) -> Row:
    """The measurements of a kernel."""
    num_sets, called, graph, first = times(subjects, case)
    row: Row = {"sets": num_sets, "graph_us": round(graph * 1e6, 2), "called_us": round(called * 1e6, 2)}
    row["first_ms"] = round(first * 1e3, 1)
    if isinstance(case, Prefill):
        return row | {"tokens_per_s": round(case.num_rows / graph), "tflops": round(case.num_flops / graph / 1e12, 1)}
    rate = case.num_bytes / graph
    share = {"gb_per_s": round(rate / 1e9, 1), "share": round(rate / bandwidth, 4)}
    return row | share | {"bytes": case.num_bytes, "target": getattr(case, "target", None)}


def times(subjects: "Subjects", case: KernelCase) -> tuple[int, float, float, float]:
    """Sets of memory that take turns, the seconds of a call, launched one by one and from a graph, and those of the
    first call, which may compile."""
    from bench.gpu import timing

    calls = subjects.calls(case)

    def launch() -> None:
        for call in calls:
            call()

    first = timing.seconds_of_first(calls[0])
    launch()  # fills the caches
    called, graph = timing.seconds(launch), timing.seconds(timing.captured(calls))
    return len(calls), called / len(calls), graph / len(calls), first


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print("\n".join(map(label, chosen(options.only))))
        return 0
    if options.table:
        rows = read(options.table)
        for path in options.more:
            rows = completed(rows, [row for row in read(path) if options.only in row["what"]])
        print(json.dumps(rows, indent=2) + "\n" if options.json else page(rows), end="")
        return 0
    if (status := ground.stand()) is not None:
        return status
    rows = measured(chosen(options.only), options.seconds, time.monotonic)
    shown = list(told(rows) if options.json else rows)
    if not options.json:
        print(page(shown))
    return int(any("failed" in row for row in shown))


def told(rows: Iterable[Row]) -> Iterator[Row]:
    """Prints each row as soon as it is measured, as items of a JSON list, so that an interrupted run loses none."""
    print("[", end="")
    for number, row in enumerate(rows):
        print(",\n" if number else "\n", json.dumps(row, indent=2), sep="", end="", flush=True)
        yield row
    print("\n]")


def completed(rows: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """`rows`, with the measured rows of another run for cases that were not measured."""

    def measured_rows(found: Sequence[Row]) -> list[Row]:
        return [row for row in found if not any(why in row for why in NOT_MEASURED)]

    done = {row["what"] for row in measured_rows(rows)}
    added = [row for row in measured_rows(others) if row["what"] not in done]
    replaced = {row["what"] for row in added}
    return [row for row in rows if row["what"] not in replaced] + added


def read(path: Path) -> list[Row]:
    """The rows that `--json` printed, including those of an interrupted run."""
    text = path.read_text().rstrip()
    return json.loads(text if text.endswith("]") else f"{text}]")


if __name__ == "__main__":
    sys.exit(main())
