"""Documents that consist of facts: the share of correct answers, and the share of answers that end.

`facts` are in the demo's wording, with keys of two words; `numbered` are lines `item-N = V`. An answer ends when the
model generates its end token before the limit. Documents and questions follow from the seed. Usage:

    python -m bench.bare --json                        # the embedded model, a service started here
    python -m bench.bare --server localhost:50051 --documents 5
"""

import argparse
import random
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.service import client_of
from bench.needle.answers import wilson
from bench.needle.documents import Question
from longleaf.client import Client
from longleaf.config import EngineConfig, embedded_model
from longleaf.demo.haystack import distinct_facts
from longleaf.types import Delta, Finished

FACTS, NUMBERED = (1, 2, 5, 20, 100), (10, 100, 300, 1000, 3000)
DOCUMENTS, QUESTIONS = 20, 2
"""For each number of facts; of a document at most so many are asked for."""
MAX_TOKENS = 64
CONTEXT = "bare"

Lines = tuple[str, list[Question]]
"""A document, and a question for each of its lines."""


def facts(rng: random.Random, count: int) -> Lines:
    found = distinct_facts(rng, count)
    questions = [Question("facts", fact.question, (fact.value,), None) for fact in found]
    return "\n".join(fact.sentence for fact in found), questions


def numbered(rng: random.Random, count: int) -> Lines:
    values = rng.sample(range(1000, 100_000), count)
    pairs = [(f"item-{number}", str(value)) for number, value in enumerate(values, 1)]
    questions = [Question("numbered", f"What is the value of {key}?", (value,), None) for key, value in pairs]
    return "\n".join(f"{key} = {value}" for key, value in pairs), questions


KINDS = {"facts": (facts, FACTS), "numbered": (numbered, NUMBERED)}


def measure(client: Client, kind: str, count: int, documents: int, seed: int) -> dict[str, Any]:
    """The row of one number of facts."""
    right = ended = requested = 0
    for number in range(documents):
        rng = random.Random(f"{seed} {kind} {count} {number}")
        text, questions = KINDS[kind][0](rng, count)
        client.ingest(CONTEXT, text)
        for question in rng.sample(questions, min(QUESTIONS, count)):
            answer, has_ended = ask(client, question.text)
            right, ended, requested = right + question.is_answered(answer), ended + has_ended, requested + 1
        client.delete_context(CONTEXT)
    low, high = wilson(right, requested)
    row = {"bench": "bare", "kind": kind, "facts": count, "documents": documents, "asked": requested, "right": right}
    return row | {"low": round(low, 4), "high": round(high, 4), "ended": ended}


def ask(client: Client, question: str) -> tuple[str, bool]:
    """The answer, and whether the model ended it."""
    events = list(client.ask(CONTEXT, question, max_tokens=MAX_TOKENS))
    last = events[-1]
    assert isinstance(last, Finished)
    return "".join(event.text for event in events if isinstance(event, Delta)), last.reason == "end_token"


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--server", metavar="HOST:PORT", help="a running service, instead of starting one")
    parser.add_argument("--model", type=Path, default=embedded_model(), help="checkpoint to serve")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="for each number of facts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    config = EngineConfig(model=str(options.model), world_size=1)
    with client_of(options.server, config, "local") as client:
        for kind, (_, counts) in KINDS.items():
            for count in counts:
                row = measure(client, kind, count, options.documents, options.seed)
                rows.append(row | {"machine": describe()})
                log(f"{kind:8} {count:>5,}: {row['right']} of {row['asked']} right, {row['ended']} ended")
    if options.json:
        print(msgspec.json.encode(rows).decode())


if __name__ == "__main__":
    main()
