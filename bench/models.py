"""Whether Longleaf answers as transformers' `generate` does, for every family, world size and state of a context.

Random checkpoints with the config of their family, float32, greedy: see tests/golden, of which this is the table. A
family is exact when all its answers are the same tokens. What a model is refused for is what `longleaf serve` would
say. Usage:

    python -m bench.models --json                           # prints the rows
    python -m bench.models --write                          # also keeps them in bench/results, and writes the page
    python -m bench.models --family llama4 phi3 --write     # only some of them; the other rows stay
    python -m bench.models --page                           # writes docs/models.md from the rows that are there
"""

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.arguments import tell
from bench.checkpoints import make_checkpoint
from bench.families import FAMILIES, REFUSED, SEEING, Family, Refused
from longleaf.errors import ModelRefused
from tests.golden.conftest import NEW_TOKENS, Golden, make_golden
from tests.golden.states import STATES, Logits, running
from tests.threads import config_for
from workers import model

RESULTS = Path(__file__).parent / "results" / "models.json"
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
WORLD_SIZES = (1, 2, 3, 4)

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*FAMILIES, *REFUSED)
    parser.add_argument("--family", dest="families", nargs="+", choices=names, default=names)
    parser.add_argument("--world-size", dest="world_sizes", nargs="+", type=int, default=WORLD_SIZES)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--write", action="store_true", help="keep the rows in bench/results and write the page")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page from the rows that are kept")
    arguments = parser.parse_args()
    rows = [] if arguments.page else [run(family, arguments.world_sizes) for family in arguments.families]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    if arguments.write or arguments.page:
        write(rows)


def run(family: Family | Refused, world_sizes: Sequence[int]) -> Row:
    """The row of a family, measured now."""
    with TemporaryDirectory() as folder:
        try:
            loaded = model.load(str(make_checkpoint(Path(folder), family)), "float32", "cpu")
        except ModelRefused as refused:
            tell(f"{family}: refused, {refused}")
            return row(family, refused=str(refused))
        golden = make_golden(Path(folder), family)
        found = [asyncio.run(compare(golden, state, n)) for n in world_sizes for state in STATES]
    is_exact, difference = all(same for same, _ in found), max(difference for _, difference in found)
    tell(f"{family}: {'exact' if is_exact else 'NOT exact'}, logits differ by {difference:.1e}")
    return row(family, is_exact, difference, loaded.bytes_per_token, world_sizes)


async def compare(golden: Golden, state: str, world_size: int) -> tuple[bool, float]:
    """Whether all answers in a state are the golden one, and how far the logits of the first one are from its."""
    logits = Logits()
    config = config_for(golden.folder, world_size=world_size, chunk_size=300, merge="gather")
    async with running(config, logits.watch) as engine:
        answers = await STATES[state](engine, golden.prompt)
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


def write(rows: list[Row]) -> None:
    """New rows take the place of those of the same family."""
    kept = {row["family"]: row for row in json.loads(RESULTS.read_text())} if RESULTS.is_file() else {}
    kept |= {row["family"]: row for row in rows}
    ordered = [kept[family] for family in (*FAMILIES, *REFUSED) if family in kept]
    RESULTS.write_text(json.dumps(ordered, indent=2) + "\n")
    PAGE.write_text("\n".join(page(ordered)) + "\n")


def page(rows: list[Row]) -> Iterator[str]:
    """The page, line by line."""
    yield "# Models"
    yield ""
    yield "Written by `python -m bench.models --write`; the rows are in [bench/results](../bench/results/models.json)."
    yield ""
    yield "Longleaf runs the models of transformers unchanged; only their attention function is its own. A family is"
    yield "exact when its greedy answers are those of transformers' `generate`, token for token, in float32, at every"
    yield f"world size of its row and in every state of a context: {', '.join(STATES)}."
    yield ""
    yield "Checkpoints are small, with random weights whose text changes when a few keys are hidden; windows, sections"
    yield "and temperatures are small enough to matter in a prompt of 1,000 tokens. The difference is the largest of a"
    yield "logit in any step of the first answer; bytes are those of a token's keys and values in the small checkpoint."
    yield f"Of checkpoints that also see images ({', '.join(SEEING)}) the text is served."
    yield ""
    yield "| family | exact | largest difference of a logit | bytes per token | world sizes |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        if row["refused"] is None:
            sizes = ", ".join(map(str, row["world_sizes"]))
            exact = "yes" if row["exact"] else "no"
            yield f"| {row['family']} | {exact} | {row['max_logit_diff']:.1e} | {row['bytes_per_token']} | {sizes} |"
    yield ""
    yield "A model that would not be exact is refused when it is loaded, with the reason:"
    yield ""
    yield "| model | refused because |"
    yield "| --- | --- |"
    for row in rows:
        if row["refused"] is not None:
            yield f"| {row['family']} | {row['refused']} |"


if __name__ == "__main__":
    main()
