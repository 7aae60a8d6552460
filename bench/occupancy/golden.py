"""The golden table: resources of each variant on each target, as readable text."""

from collections.abc import Mapping
from pathlib import Path

from bench.occupancy.compiling import Resources
from bench.occupancy.targets import TARGETS

PATH = Path(__file__).resolve().parents[2] / "tests/triton/resources.txt"
HEAD = """\
# Kernels compiled ahead of time with Triton {triton}; written by `python -m bench.occupancy --write`.
# Registers of a thread / bytes that it spills / bytes of shared memory of a program / busy cycles of a turn of the loop
# over tiles (0: unknown, see bench/occupancy/sass.py).
"""

Table = dict[str, dict[str, Resources]]
"""By variant and target."""


def written(table: Mapping[str, Mapping[str, Resources]], triton_version: str) -> str:
    """The text of a table."""
    width = max(map(len, table), default=0)
    names = [target for target in TARGETS if any(target in row for row in table.values())]
    rows = [("variant", names), *((name, [str(row.get(n, "-")) for n in names]) for name, row in table.items())]
    lines = [f"{name:{width}}  " + " ".join(f"{cell:>20}" for cell in cells) for name, cells in rows]
    return HEAD.format(triton=triton_version) + "".join(line.rstrip() + "\n" for line in lines)


def parsed(text: str) -> Table:
    """The table of a text."""
    first, *rest = [line for line in text.splitlines() if not line.startswith("#")]
    names = first.split()[1:]
    table: Table = {}
    for line in rest:
        name, *cells = (part.strip() for part in line.rsplit(maxsplit=len(names)))
        table[name] = {n: Resources.parse(cell) for n, cell in zip(names, cells, strict=True) if cell != "-"}
    return table


def read() -> Table:
    """The table that is kept."""
    return parsed(PATH.read_text())
