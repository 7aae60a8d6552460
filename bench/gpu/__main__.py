"""Command line of the measurements on a GPU, see `bench.gpu`."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu import ground
from bench.gpu.cases import Case, Prefill, cases, label
from bench.gpu.table import page

if TYPE_CHECKING:
    from bench.gpu.subjects import Subjects
    from longleaf.kernels.backend import Backend

SECONDS = 540.0
Row = dict[str, Any]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--list", action="store_true", help="say what is measured, and measure nothing")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of rows that --json printed")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose line, as --list has it, holds this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after so many no further case is begun")
    return parser.parse_args(arguments)


def chosen(text: str) -> list[Case]:
    return [case for case in cases() if text in label(case)]


def measured(wanted: Sequence[Case], limit: float, clock: Callable[[], float]) -> Iterator[Row]:
    """A row for each case, until the time is over; what is left out is told."""
    import torch

    from bench.gpu import machine, timing
    from bench.gpu.subjects import Subjects

    begin, device = clock(), ground.DEVICE
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    bandwidth = timing.copy_bandwidth(device)
    backends = load()
    head = {"bench": "gpu", "copy_gb_per_s": round(bandwidth / 1e9, 1)}
    runs = [(case, each) for case in wanted for each in backends if each is backends[0] or isinstance(case, Prefill)]
    for turn, (case, backend) in enumerate(runs):
        if clock() - begin > limit:
            tell(f"{limit:.0f} s are over: {len(runs) - turn} measurements are left out, from: {label(case)}")
            return
        row = timed(Subjects(backend, device), case, bandwidth)
        torch.cuda.empty_cache()
        tell(f"  {label(case)}, {backend.name}: {row['graph_us']} us")
        yield {**head, "kernels": backend.name, **row, "machine": machine.describe(device)}


def load() -> "list[Backend]":
    """The backends of the current GPU: Triton's kernels, and where they can be had flash kernels for many rows."""
    from longleaf.kernels.gpu.backend import TritonKernels

    found: list[Backend] = [TritonKernels.load()]
    try:
        from longleaf.kernels.gpu.flash import FlashKernels

        found.append(FlashKernels.load())
    except (ImportError, RuntimeError) as error:
        tell(f"no flash kernels: {error}")
    return found


def timed(subjects: "Subjects", case: Case, bandwidth: float) -> Row:
    """The row of a case."""
    num_sets, called, graph = times(subjects, case)
    row: Row = {"case": case.name, "what": label(case), **case._asdict(), "sets": num_sets}
    row |= {"graph_us": round(graph * 1e6, 2), "called_us": round(called * 1e6, 2)}
    if isinstance(case, Prefill):
        return row | {"tokens_per_s": round(case.num_rows / graph), "tflops": round(case.num_flops / graph / 1e12, 1)}
    rate = case.num_bytes / graph
    share = {"gb_per_s": round(rate / 1e9, 1), "share": round(rate / bandwidth, 4)}
    return row | share | {"bytes": case.num_bytes, "target": getattr(case, "target", None)}


def times(subjects: "Subjects", case: Case) -> tuple[int, float, float]:
    """Sets of memory that take turns, and the seconds of a call: launched one by one, and from a graph."""
    from bench.gpu import timing

    calls = subjects.calls(case)

    def launch() -> None:
        for call in calls:
            call()

    launch()  # compiles, and makes what is kept for later calls
    called, graph = timing.seconds(launch), timing.seconds(timing.captured(calls))
    return len(calls), called / len(calls), graph / len(calls)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print("\n".join(map(label, chosen(options.only))))
        return 0
    if options.table:
        print(page(json.loads(options.table.read_text())), end="")
        return 0
    if (status := ground.stand()) is not None:
        return status
    rows = list(measured(chosen(options.only), options.seconds, time.monotonic))
    print(json.dumps(rows, indent=2) if options.json else page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
