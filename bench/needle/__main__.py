"""Retrieval of facts in long documents by a served model: accuracy by task, length and depth.

A service ingests seeded documents with facts in them, and answers questions about the facts over gRPC. Answers are
stored line by line, so an interrupted run resumes. Usage:

    python -m bench.needle --json                                       # the embedded model, a service started here
    python -m bench.needle --lengths 4000 64000 --questions 20
    python -m bench.needle --server localhost:50051 --instruction "Answer only with the value, or with: not found."

Lengths are in tokens of the served model. An answer is right if it contains the fact's whole value, or "not found" for
a key that the document does not have.
"""

import argparse
import json
import random
import time
from pathlib import Path

import msgspec

from bench.harness.arguments import RESULTS, log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.service import client_of
from bench.needle.answers import Answer, Answers, Place, rows
from bench.needle.chart import draw
from bench.needle.documents import MAKERS, TASKS, Document, Question, size_of
from longleaf.client import Client
from longleaf.config import EngineConfig, embedded_model
from longleaf.types import Delta, Finished

LENGTHS = (4_000, 64_000, 256_000, 1_000_000)
MANY_DOCUMENTS, FEW_DOCUMENTS, LONG = 20, 5, 200_000
"""Documents per length: many where they are read quickly, few from LONG tokens on."""


class Asker:
    """Asks a service about documents, and keeps the answers."""

    def __init__(self, client: Client, answers: Answers, options: argparse.Namespace) -> None:
        self._client = client
        self._answers = answers
        self._options = options
        self._model = client.cluster().model.name

    def measure(self, kind: str, tokens: int) -> None:
        """All documents of one kind at one length."""
        documents = min(MANY_DOCUMENTS if tokens < LONG else FEW_DOCUMENTS, self._options.questions)
        count = self._options.questions // documents
        size = size_of(self._client, kind, tokens)
        for number in range(documents):
            rng = random.Random(f"{self._options.seed} {kind} {tokens} {number}")
            document = MAKERS[kind](rng, size, count)
            self._examine(
                f"{kind}, {tokens:,} tokens, document {number + 1} of {documents}", document, tokens, number, count
            )

    def _examine(self, title: str, document: Document, tokens: int, number: int, density: int) -> None:
        place = Place(self._model, self._options.seed, tokens, number, density, "", 0)
        first, later = (self._open(requested, place) for requested in (document.questions, document.later_questions))
        if not first and not later:
            return
        name = "needle"
        if any(context.id == name for context in self._client.list_contexts()):
            self._client.delete_context(name)
        began = time.perf_counter()
        resident = self._client.ingest(name, document.text).tokens
        speed = resident / (time.perf_counter() - began)
        log(f"{title}: {resident:,} tokens read at {speed:,.0f}/s")
        self._ask_all(name, first, resident, speed)
        if later:
            resident = self._client.ingest(name, document.appended, append=True).tokens
            self._ask_all(name, later, resident, speed)
        self._client.delete_context(name)

    def _open(self, questions: tuple[Question, ...], document: Place) -> list[tuple[Place, Question]]:
        """The questions that are wanted and have no answer yet."""
        places = (
            msgspec.structs.replace(document, task=question.task, question=i) for i, question in enumerate(questions)
        )
        wanted = (
            (place, question) for place, question in zip(places, questions, strict=True) if place not in self._answers
        )
        return [(place, question) for place, question in wanted if question.task in self._options.tasks]

    def _ask_all(self, context: str, questions: list[tuple[Place, Question]], num_tokens: int, speed: float) -> None:
        right: dict[str, list[bool]] = {}
        for place, question in questions:
            text, first_token = self._ask(context, question)
            is_right = question.is_answered(text)
            right.setdefault(place.task, []).append(is_right)
            self._answers.add(
                Answer(
                    place,
                    question.depth,
                    question.text,
                    question.values,
                    text,
                    is_right,
                    num_tokens,
                    speed,
                    first_token,
                )
            )
        for task, found in right.items():
            log(f"  {task}: {sum(found)} of {len(found)}")

    def _ask(self, context: str, question: Question) -> tuple[str, float]:
        """The answer, and the seconds to its first token."""
        text = f"{self._options.instruction} {question.text}".strip()
        events = list(self._client.ask(context, text, max_tokens=self._options.max_tokens))
        last = events[-1]
        assert isinstance(last, Finished)
        return "".join(e.text for e in events if isinstance(e, Delta)), last.timings.first_token_seconds


def parse() -> argparse.Namespace:
    tasks = [task for family in TASKS.values() for task in family]
    parser = argparse.ArgumentParser(
        "python -m bench.needle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--server", metavar="HOST:PORT", help="a running service, instead of starting one")
    parser.add_argument("--model", type=Path, default=embedded_model(), help="checkpoint to serve")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--launcher", choices=("ray", "local"), default="local")
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks, metavar="TASK", help=", ".join(tasks))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--questions", type=int, default=100, help="per task and length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--instruction", default="", help="instruction before each question")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of needle.jsonl, needle.json and needle.png")
    return parser.parse_args()


def main() -> None:
    unwind_on_terminate()
    options = parse()
    answers = Answers(options.out / "needle.jsonl")
    config = EngineConfig(model=str(options.model), world_size=options.world_size)
    try:
        with client_of(options.server, config, options.launcher) as client:
            measure(client, answers, options)
    finally:
        found = rows(answers)
        if found:
            write(found, options.out)
    if options.json:
        print(msgspec.json.encode(found).decode())
        return
    for row in found:
        if row["depth"] is None:
            cell = f"{row['task']:16} {row['context_tokens']:>9,} tokens"
            print(f"{cell} {row['right']:>4} of {row['asked']:<4} {row['low']:.0%} to {row['high']:.0%}")


def measure(client: Client, answers: Answers, options: argparse.Namespace) -> None:
    """All lengths, the shortest first."""
    asker = Asker(client, answers, options)
    for tokens in sorted(options.lengths):
        for kind, tasks in TASKS.items():
            if not set(tasks).isdisjoint(options.tasks):
                asker.measure(kind, tokens)


def write(found: list[dict[str, object]], folder: Path) -> None:
    """The rows as JSON and as a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "needle.json").write_text(json.dumps({"machine": describe(), "rows": found}, indent=1) + "\n")
    draw(found, folder / "needle.png")


if __name__ == "__main__":
    main()
