"""Agreement of Longleaf with transformers' `generate`, for every family, world size and state of a context.

Random checkpoints with the config of their family, greedy; tests/golden has the same cases. A family is exact when all
its answers in float32 are the same tokens. In half precision tokens are a weak measure, as rounding decides between
close ones: there the table compares the distance of logits from float32 with that of plain attention in the same type.
Refusals are those of `longleaf serve`. Usage:

    python -m bench.models --json                           # prints the rows
    python -m bench.models --write                          # also keeps them in bench/results, and writes the page
    python -m bench.models --family llama4 phi3 --write     # only some of them; the other rows stay
    python -m bench.models --dtype bfloat16 --write         # only one type; results of the others stay
    python -m bench.models --page                           # writes docs/models.md from the rows that are there
"""

import argparse
import asyncio
import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness.arguments import log
from bench.pages.rendering import render
from longleaf.errors import LongleafError, ModelRefused
from tests.support.golden.plain import NEW_TOKENS, Golden, make_golden
from tests.support.golden.rounding import ALLOWED, plain_logits, ratio, served_logits
from tests.support.golden.states import AT_ENDS, STATES, Logits, State, running
from tests.support.threads import config_for
from workers.model import model
from zoo.checkpoints import make_checkpoint
from zoo.families import FAMILIES, HYBRIDS, REFUSED, SEEING, Family, Hybrid, Refused

RESULTS = Path(__file__).parent / "results" / "models.json"
CLASSES = Path(__file__).parent / "results" / "classes.json"
"""Written by `bench.classes`."""
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
MAX_REASON = 160
"""Characters of a reason in the table of all classes."""
WORLD_SIZES = (1, 2, 3, 4)
HALVES = ("bfloat16", "float16")
DTYPES = ("float32", *HALVES)
PARTS = ((), (111, 120, 650))
"""The ends of the context's parts; the prompt continues a fork at the last end. Empty: the prompt has no context."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*FAMILIES, *HYBRIDS, *REFUSED)
    parser.add_argument("--family", dest="families", nargs="+", choices=names, default=names)
    parser.add_argument("--world-size", dest="world_sizes", nargs="+", type=int, default=WORLD_SIZES)
    parser.add_argument("--dtype", dest="dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--write", action="store_true", help="keep the rows in bench/results and write the page")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page from the rows that are kept")
    arguments = parser.parse_args()
    rows = (
        []
        if arguments.page
        else [run(family, arguments.dtypes, arguments.world_sizes) for family in arguments.families]
    )
    if arguments.json:
        print(json.dumps(rows, indent=2))
    if arguments.write or arguments.page:
        write(rows)


def run(family: Family | Hybrid | Refused, dtypes: Sequence[str], world_sizes: Sequence[int]) -> Row:
    """The row of a family, measured now, in some of the types."""
    with TemporaryDirectory() as folder:
        try:
            loaded = model.load(str(make_checkpoint(Path(folder), family)), "float32", "cpu")
        except ModelRefused as refused:
            log(f"{family}: refused, {refused}")
            return row(family, refused=str(refused))
        golden = make_golden(Path(folder), family)
        found: Row = {"family": family}
        if "float32" in dtypes:
            found = measure_exactness(golden, family, loaded.bytes_per_token, world_sizes, loaded.bytes_per_state)
        for dtype in (dtype for dtype in HALVES if dtype in dtypes):
            found[dtype] = asyncio.run(measure_rounding(golden, dtype, world_sizes))
            log(f"{family} in {dtype}: {half(found[dtype])}")
    return found


def measure_exactness(
    golden: Golden, family: str, bytes_per_token: int, world_sizes: Sequence[int], bytes_per_state: int = 0
) -> Row:
    """Tokens and logits in float32, in every state of a context."""
    states = AT_ENDS if bytes_per_state else STATES
    found = [asyncio.run(compare(golden, state, n)) for n in world_sizes for state in states.values()]
    is_exact, difference = all(same for same, _ in found), max(difference for _, difference in found)
    log(f"{family}: {'exact' if is_exact else 'NOT exact'}, logits differ by {difference:.1e}")
    own = {"bytes_per_state": bytes_per_state} if bytes_per_state else {}
    return row(family, is_exact, difference, bytes_per_token, world_sizes) | own


async def measure_rounding(golden: Golden, dtype: str, world_sizes: Sequence[int]) -> Row:
    """By how many times as much as the plain model in this type the service is off from float32, at worst."""
    exact, plain = plain_logits(golden), plain_logits(golden, dtype)
    if not plain.isfinite().all():
        return rounded(world_sizes, failure="not finite, in the plain model either")
    ratios: list[float] = []
    for num_ranks, parts in itertools.product(world_sizes, PARTS):
        try:
            found = await served_logits(golden, parts, world_size=num_ranks, dtype=dtype)
        except LongleafError as error:
            return rounded(world_sizes, failure=f"{type(error).__name__} on {num_ranks} ranks: {error}")
        if not found.isfinite().all():
            return rounded(world_sizes, failure=f"not finite on {num_ranks} ranks, but in the plain model")
        ratios.append(ratio(golden, found, plain, exact))
    return rounded(world_sizes, max(ratios))


async def compare(golden: Golden, state: State, world_size: int) -> tuple[bool, float]:
    """Whether all answers in a state are the golden one, and how far the logits of the first one are from its."""
    logits = Logits()
    config = config_for(golden.folder, world_size=world_size, chunk_size=300, merge="gather")
    async with running(config, logits.watch) as engine:
        answers = await state(engine, golden.prompt)
    difference = (logits.first(NEW_TOKENS) - golden.logits_TV).abs().max()
    return answers == [golden.tokens] * len(answers), float(difference)


def row(
    family: str,
    is_exact: bool = False,
    difference: float | None = None,
    bytes_per_token: int | None = None,
    world_sizes: Sequence[int] = (),
    refused: str | None = None,
) -> Row:
    return {
        "family": family,
        "exact": is_exact,
        "refused": refused,
        "max_logit_diff": difference,
        "bytes_per_token": bytes_per_token,
        "world_sizes": list(world_sizes),
    }


def rounded(world_sizes: Sequence[int], ratio: float | None = None, failure: str | None = None) -> Row:
    """The results of one half-precision dtype."""
    return {"ratio": ratio, "failure": failure, "world_sizes": list(world_sizes)}


def write(rows: list[Row]) -> None:
    """Replaces earlier rows of the same family and dtype with the new rows."""
    retained: dict[str, Row] = (
        {row["family"]: row for row in json.loads(RESULTS.read_text())} if RESULTS.is_file() else {}
    )
    retained |= {row["family"]: retained.get(row["family"], {}) | row for row in rows}
    ordered = [retained[family] for family in (*FAMILIES, *HYBRIDS, *REFUSED) if family in retained]
    RESULTS.write_text(json.dumps(ordered, indent=2) + "\n")
    PAGE.write_text(page(ordered, json.loads(CLASSES.read_text())))


def page(rows: list[Row], walk: Row) -> str:
    """The text of docs/models.md, from the rows of families and from the results of `bench.classes`."""
    refused = [row for row in rows if row.get("refused") is not None]
    served = [row for row in rows if row.get("refused") is None]
    values = {"states": STATES, "seeing": SEEING, "allowed": ALLOWED, "half": half}
    counts = Counter(found["result"] for found in walk["findings"])
    classes = {"walk": walk, "counts": counts, "describe_result": describe_result}
    return render("models", served=served, refused=refused, **values, **classes)


def describe_result(found: Row) -> str:
    """The result for a class, with one short sentence of the reason."""
    reason = textwrap.shorten(found["reason"].split(". ")[0], MAX_REASON, placeholder=" …").replace("|", "\\|")
    result = "not possible in transformers" if found["result"] == "cannot" else found["result"]
    return f"{result}: {reason}" if reason else result


def half(found: Row | None) -> str:
    """The description of a family's results in half precision."""
    if found is None:
        return "not run"
    if found["failure"] is not None:
        return f"no: {found['failure']}"
    return f"{'no: ' if found['ratio'] > ALLOWED else ''}{found['ratio']:.2f}"


if __name__ == "__main__":
    main()
