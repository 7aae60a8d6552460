"""How much sooner answers come whose tokens are drafted: the same questions, with and without, turn by turn."""

import random
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from bench.durable.options import Row
from bench.harness.arguments import log
from bench.harness.subjects import Subject
from bench.needle.documents import prose, size_of
from longleaf.client import Client
from longleaf.demo.facts import EVALUATION_WORDS, make_fact, make_key
from longleaf.demo.haystack import library_texts
from longleaf.types import Finished

KINDS = ("demo", "long", "random")
"""`demo`: facts like the demo's, with its short values. `long`: values of many words. `random`: random ids for a random
model, whose text repeats nothing."""
MOST_TOKENS = {"demo": 64, "long": 256, "random": 128}
VALUE_WORDS = 16
NUM_QUESTIONS = 8
CONTEXT = "draft"


class QuestionSet(NamedTuple):
    """A question and its document."""

    document: str | list[int]
    questions: list[str]
    ignores_end: bool


class Turn(NamedTuple):
    """One answer."""

    text: str
    tokens: int
    seconds: float
    """From its first token to its last."""
    drafted: int
    accepted: int


def measure(client: Client, subject: Subject, kind: str, tokens: int, repeats: int) -> Row:
    """Tokens per second of the answers to all questions, without drafts and with them."""
    requested = _question_set(client, subject, kind, tokens)
    client.ingest(CONTEXT, requested.document)
    pairs = list(_pairs(client, requested, MOST_TOKENS[kind], repeats))
    client.delete_context(CONTEXT)
    off, on = ([turn for turn in turns if turn.tokens > 1] for turns in zip(*pairs, strict=True))
    ratios = [a.seconds / b.seconds for a, b in pairs if a.tokens == b.tokens > 1]
    row: Row = {"kind": kind, "context_tokens": tokens, "answers": len(pairs)}
    row |= {"equal": sum(a.text == b.text for a, b in pairs), "tokens": sum(turn.tokens for turn in on)}
    row |= {"drafted": sum(turn.drafted for turn in on), "accepted": sum(turn.accepted for turn in on)}
    for name, turns in (("off", off), ("on", on)):
        row[f"{name}_tokens_per_s"] = round(median((turn.tokens - 1) / turn.seconds for turn in turns), 1)
    return row | {
        "ratio": round(median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def _pairs(client: Client, question_set: QuestionSet, most: int, repeats: int) -> Iterator[tuple[Turn, Turn]]:
    """Each question without and with drafts, by turns either first; the first round warms up."""
    for turn in range(repeats + 1):
        for number, question in enumerate(question_set.questions):
            order = (0, None) if (turn + number) % 2 else (None, 0)
            found = {limit: _ask(client, question, most, limit, question_set.ignores_end) for limit in order}
            if turn:
                yield found[0], found[None]
        log(f"round {turn} of {repeats}")


def _ask(client: Client, question: str, most: int, limit: int | None, ignores_end: bool) -> Turn:
    """`limit` is None where as many drafts are allowed as the service allows."""
    options = {"max_tokens": most, "ignore_end_token": ignores_end, "max_draft_tokens": limit}
    *events, last = client.ask(CONTEXT, question, **options)
    assert isinstance(last, Finished)
    text, usage = "".join(getattr(event, "text", "") for event in events), last.usage
    tokens = usage.completion_tokens
    return Turn(text, tokens, last.timings.decode_seconds, usage.drafted_tokens, usage.accepted_tokens)


def _question_set(client: Client, subject: Subject, kind: str, tokens: int) -> QuestionSet:
    rng = random.Random(f"draft {kind}")
    if kind == "random":
        return QuestionSet(subject.tokens(tokens), [f"question {number}?" for number in range(NUM_QUESTIONS)], True)
    size = size_of(client, "prose", tokens)
    if kind == "demo":
        document = prose(rng, size, NUM_QUESTIONS)
        questions = [question.text for question in document.questions if question.task == "single_prose"]
        return QuestionSet(document.text, questions, False)
    keys = [make_key(rng, EVALUATION_WORDS) for _ in range(NUM_QUESTIONS)]
    facts = [make_fact(rng, key, "-".join(rng.choices(EVALUATION_WORDS, k=VALUE_WORDS))) for key in keys]
    text, texts = "", library_texts(rng)
    while len(text) < size:
        text += next(texts)
    pieces = [text[size * i // NUM_QUESTIONS : size * (i + 1) // NUM_QUESTIONS] for i in range(NUM_QUESTIONS)]
    whole = "\n".join(part for piece, fact in zip(pieces, facts, strict=True) for part in (piece, fact.sentence))
    return QuestionSet(whole, [fact.question for fact in facts], False)
