# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Command line of the resource table of GPU kernels, see `bench.occupancy`."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import triton

from bench.occupancy import golden
from bench.occupancy.bounds import bound_of
from bench.occupancy.compiling import Resources, compile_variant
from bench.occupancy.targets import TARGETS
from bench.occupancy.variants import KernelVariant, variants

Pair = tuple[str, str]
"""Names of a variant and of a target."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=".*", metavar="PATTERN", help="variants whose whole name matches")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--fresh", action="store_true", help="compile, and print the table of the result")
    parser.add_argument("--write", action="store_true", help=f"compile, and write it into {golden.PATH.name}")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    return parser.parse_args(arguments)


def compiled(wanted: Sequence[Pair], num_jobs: int) -> Iterator[tuple[Pair, Resources | str]]:
    """The compiler's figures for some variants and targets, or the reason of a refusal."""
    with ProcessPoolExecutor(num_jobs) as pool:
        for pair, used in zip(wanted, pool.map(compile_pair, wanted, chunksize=4), strict=True):
            print(f"  {pair[1]:7} {pair[0]}: {used}", file=sys.stderr, flush=True)
            yield pair, used


def compile_pair(pair: Pair) -> Resources | str:
    name, target = pair
    try:
        return compile_variant(by_name(target)[name], TARGETS[target])
    except Exception as error:  # compilers raise arbitrary errors, and the other variants are still reported
        return f"{type(error).__name__}: {error.__cause__ or error}"


@cache
def by_name(target: str) -> dict[str, KernelVariant]:
    """The variants that a target has."""
    return {variant.name: variant for variant in variants(TARGETS[target].limits)}


def all_names() -> list[str]:
    """Those of all targets, in order: no target has one that sm_90 has not."""
    return list(by_name("sm_90"))


def fresh(names: Sequence[str], targets: Sequence[str], num_jobs: int) -> tuple[golden.Table, int]:
    """The table of the variants compiled now, and the number of refusals."""
    table: golden.Table = {name: {} for name in names}
    wanted = [(name, target) for name in names for target in targets if name in by_name(target)]
    num_refused = 0
    for (name, target), used in compiled(wanted, num_jobs):
        if isinstance(used, Resources):
            table[name][target] = used
        else:
            num_refused += 1
    return table, num_refused


def bounds(table: golden.Table, targets: Sequence[str]) -> Iterator[str]:
    """Lines with the bounds of the attention kernels."""
    head = "programs KiB in flight  memory  arithmetic  matrix   bound"
    yield f"{'variant':32} {'target':8} {head}"
    for name, row in table.items():
        for target in targets:
            if name.startswith("attend") and target in row:
                found = bound_of(by_name(target)[name], TARGETS[target], row[target])
                shares = (found.memory, found.arithmetic, found.matrix, found.share)
                cells = [f"{share:>8.0%}" for share in shares]
                kib = found.bytes_in_flight / 1024
                yield f"{name:32} {target:8} {found.num_programs:>8} {kib:>12.0f}" + "  ".join(cells)


def main() -> int:
    options = parse()
    names = [name for name in all_names() if re.fullmatch(options.only, name)]
    if not (options.fresh or options.write):
        retained = golden.read()
        print("\n".join(bounds({name: retained[name] for name in names}, options.target)))
        return 0
    table, num_refused = fresh(names, options.target, options.jobs)
    if options.write:
        retained = golden.read() if golden.PATH.exists() else {}
        table = {name: retained.get(name, {}) | table.get(name, {}) for name in all_names()}
        golden.PATH.write_text(golden.written(table, triton.__version__))
    else:
        print(golden.written(table, triton.__version__), end="")
    return int(num_refused > 0)


if __name__ == "__main__":
    sys.exit(main())
