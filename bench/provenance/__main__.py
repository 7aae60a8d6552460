"""Accuracy of the reported sources of answers, and the cost of reporting them.

Documents and questions are those of bench.needle: single facts, facts among near duplicates, and keys that the document
does not hold. For pretrained chat models, which do not know its formats, `--planted` uses facts in real prose instead:
a development set of 40 questions, and a final set of 100. Usage:

    python -m bench.provenance --json                                    # the embedded model; takes hours
    python -m bench.provenance --lengths 4000 64000 --questions 20
    python -m bench.provenance --model random-llama --lengths            # only the cost, for another model
    python -m bench.provenance --model FOLDER --into provenance.json     # another model, beside the rows in the file
    python -m bench.provenance --model FOLDER --planted final --cost-lengths --into provenance_smollm2.json

Rows count, for right and for wrong answers separately, in how many of them (`of`) the first source, or one of the first
three, contains the fact, and in how many hiding the fact costs the answer most. held_or_absent: the area under the ROC
curve with which the first source's share, and the largest drop, separate right answers from answers about keys that are
not in the text; `invented`: the number of those keys for which the model still gave a value. cost: milliseconds per
token of an answer without and with sources. Methods are raw and contrast, as in docs/provenance.md. `--model` measures
without targets: the targets are for the embedded model up to 256,000 tokens. With `--into FILE.json` a picture is
written beside it, except for planted facts.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.parts import gathered
from bench.harness.service import client_of
from bench.harness.subjects import EMBEDDED, NAMES, checkpoint
from bench.needle.documents import Question, prose, size_of
from bench.provenance.asking import Attributed, ask, ask_by_line, place_of
from bench.provenance.chart import draw
from bench.provenance.cost import cost
from bench.provenance.planted import LENGTHS as LENGTHS_OF_SETS
from bench.provenance.planted import documents
from bench.provenance.rows import Row, rows
from longleaf.client import Client
from longleaf.config import EngineConfig
from longleaf.runs import ceil_div
from longleaf.types import Ranking

METHODS: tuple[Ranking, ...] = ("raw", "contrast")
TASKS = ("single_prose", "near_duplicate", "absent")
LENGTHS = (4_000, 16_000, 64_000, 256_000, 1_000_000)
PER_DOCUMENT = 20
"""Questions of each task about one document, which is read once."""
TOKENS_PER_QUESTION = 800
"""At least, of a document: for each question of each task some ten sentences are planted."""
CONTEXT = "provenance"
MEASURED = ("model", "tokens", "task")
"""The key of a row: a new row replaces an earlier one with the same key."""


def main() -> None:
    unwind_on_terminate()
    given = parse()
    with checkpoint(given.model) as folder:
        config = EngineConfig(model=str(folder), world_size=given.world_size)
        with client_of(given.server, config, "local") as client:
            model = client.cluster().model.name
            measured = ({"model": model, **row, "machine": describe()} for row in measure(client, given))
            found = gathered("provenance", measured, given, MEASURED, line, lambda row: (row["model"], row["tokens"]))
    if given.into and not given.planted:
        draw(found, given.into.with_suffix(".png"))


def line(row: Row) -> str:
    return "  ".join(f"{name} {value}" for name, value in row.items() if name != "machine")


def measure(client: Client, given: argparse.Namespace) -> Iterator[Row]:
    """All lengths, the shortest first, then the cost."""
    if given.planted:
        yield from rows(list(examine_planted(client, given.planted)))
    for tokens in () if given.planted else sorted(given.lengths):
        yield from rows(list(examine(client, tokens, given.questions)))
    for tokens in given.cost_lengths:
        yield cost(client, tokens, given.repeats)


def examine(client: Client, tokens: int, count: int) -> Iterator[Attributed]:
    """Documents of one length, with so many questions of each task in all."""
    size = size_of(client, "prose", tokens)
    most = num_together(tokens)
    for number in range(ceil_div(count, most)):
        num_here = min(most, count - number * most)
        document = prose(random.Random(f"provenance {tokens} {number}"), size, num_here)
        resident = client.ingest(CONTEXT, document.text).tokens
        found = list(_ask_all(client, document.text, document.questions, tokens))
        client.delete_context(CONTEXT)
        right = sum(each.rank == 0 and each.method == "raw" for each in found)
        log(f"{tokens:,} tokens, document {number + 1} ({resident:,} tokens): the first source is right {right} times")
        yield from found


def examine_planted(client: Client, name: str) -> Iterator[Attributed]:
    """The documents of a set of `bench.provenance.planted`."""
    for number, (tokens, document) in enumerate(zip(LENGTHS_OF_SETS[name], documents(name), strict=True)):
        resident, found = client.ingest(CONTEXT, document.text).tokens, list[Attributed]()
        for question in document.questions:
            place = place_of(client, CONTEXT, document.text, question)
            found += ask_by_line(client, CONTEXT, question, place, tokens)
            log(f"{question.text} right: {found[-2].is_right}; ranks: {found[-2].rank}, raw {found[-1].rank}")
        client.delete_context(CONTEXT)
        log(f"document {number + 1} has {resident:,} tokens")
        yield from found


def num_together(tokens: int) -> int:
    """Questions of each task about one document of so many tokens."""
    return min(PER_DOCUMENT, max(1, tokens // TOKENS_PER_QUESTION))


def _ask_all(client: Client, text: str, questions: tuple[Question, ...], tokens: int) -> Iterator[Attributed]:
    for question in questions:
        if question.task in TASKS:
            place = place_of(client, CONTEXT, text, question)
            for method in METHODS:
                yield ask(client, CONTEXT, question, place, tokens, method)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.provenance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--server", metavar="HOST:PORT", help="a running service, instead of starting one")
    parser.add_argument("--model", default=EMBEDDED, help=f"{' or '.join(NAMES)}, or a checkpoint's folder")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--planted", choices=LENGTHS_OF_SETS, help="facts in real prose, instead of --lengths")
    parser.add_argument("--questions", type=int, default=100, help="per task and length")
    parser.add_argument("--cost-lengths", nargs="*", type=int, default=(64_000,), metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=9, help="turns of the cost")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a result whose other rows stay as they are")
    given = parser.parse_args(arguments)
    if given.questions < 1 or given.repeats < 1 or given.world_size < 1:
        parser.error("--questions, --repeats, --world-size: too few to measure")
    return given


if __name__ == "__main__":
    main()
