"""Documents with facts in them, and the questions whose answers are known. Everything follows from a seed.

The tasks are those that long-context evaluations have in common (passkey: Mohtashami & Jaggi 2023; needles in a
haystack: Kamradt 2023; keys, values and distractors: RULER, Hsieh et al. 2024), with words and texts of their own.
"""

import json
import random
import uuid
from collections.abc import Callable, Iterable, Sequence

import msgspec

from longleaf.client import Client
from longleaf.demo.facts import EVALUATION_WORDS, Fact, is_correct, make_fact, make_value, without_value
from longleaf.demo.haystack import DISTRACTOR_EVERY, canonical, cut, distinct_facts, library_text, plant, room

NOISE = "The wind went over the field. The river ran on. Nobody was there to see it. The day was long.\n"
TWINS = 2
"""Distractors with nearly the same key, for each fact of near_duplicate."""
VALUES = 3
"""Values of each key of multi_value."""
APPENDED = 0.02
"""Length of the appended text, as a share of the document."""
SAMPLE_BYTES = 20_000
"""Text on which a model's bytes per token are measured."""


class Question(msgspec.Struct, frozen=True):
    """A question and all values that its answer must contain; if empty, the answer must be "not found"."""

    task: str
    text: str
    values: tuple[str, ...]
    depth: float | None
    """Where its fact stands, 0 to 1; None when it stands nowhere, or in several places."""

    def is_answered(self, answer: str) -> bool:
        facts = [Fact("", value, "", self.text, "") for value in self.values or ("",)]
        return all(is_correct(answer, fact) for fact in facts)


class Document(msgspec.Struct, frozen=True):
    """A text and questions about it; then a text to append, and questions about the whole."""

    text: str
    questions: tuple[Question, ...]
    appended: str = ""
    later_questions: tuple[Question, ...] = ()


Maker = Callable[[random.Random, int, int], Document]
"""Makes a document of about so many bytes with so many questions per task."""


def prose(rng: random.Random, size: int, count: int) -> Document:
    """Source text of the Python library with single keys, near duplicates, many values, and appended facts."""
    facts = distinct_facts(rng, 5 * count + size // DISTRACTOR_EVERY)
    single, base, multiple, later, absent, rest = _deal(facts, *[count] * 5)
    doubles = twins(rng, base, facts)
    many = [[_with_value(rng, fact) for _ in range(VALUES)] for fact in multiple]
    planted = [*single, *base, *doubles, *(fact for values in many for fact in values), *rest]
    rng.shuffle(planted)
    text = _fill(rng, size, planted)
    addition = _fill(rng, max(int(size * APPENDED), 60 * count), later)
    questions = [
        *_ask("single_prose", single, text),
        *_ask("near_duplicate", base, text),
        *(Question("multi_value", facts[0].question, tuple(f.value for f in facts), None) for facts in many),
        *_ask("absent", [without_value(fact) for fact in absent], text),
    ]
    return Document(text, tuple(questions), addition, tuple(_ask("append", later, addition)))


def noise(rng: random.Random, size: int, count: int) -> Document:
    """The same few sentences over and over, with one pass key and some needles."""
    number = rng.randrange(10**4, 10**6)
    passkey = Fact("pass key", str(number), f"The pass key is {number}. Remember it.", "What is the pass key?", "")
    facts = [passkey, *distinct_facts(rng, count)]
    rng.shuffle(facts)
    sentences = [fact.sentence for fact in facts]
    filler = room(sentences, size)
    text = plant(rng, cut(NOISE * (filler // len(NOISE) + 1), filler), sentences)
    needles = [fact for fact in facts if fact is not passkey]
    return Document(text, (*_ask("passkey", [passkey], text), *_ask("single_noise", needles, text)))


def pairs(rng: random.Random, size: int, count: int) -> Document:
    """A JSON object of random keys and values: nothing but distractors."""

    def identifier() -> str:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    found = {identifier(): identifier() for _ in range(max(size // 80, count))}
    text = json.dumps(found, indent=0)
    requested = rng.sample(sorted(found), count)
    facts = [Fact(key, found[key], key, f'What is the value stored under "{key}"?', "") for key in requested]
    return Document(text, tuple(_ask("key_value", facts, text)))


MAKERS: dict[str, Maker] = {"prose": prose, "noise": noise, "pairs": pairs}
TASKS = {
    "prose": ("single_prose", "near_duplicate", "multi_value", "absent", "append"),
    "noise": ("passkey", "single_noise"),
    "pairs": ("key_value",),
}
"""Tasks by the kind of document that they share."""


def size_of(client: Client, kind: str, tokens: int) -> int:
    """Bytes of a document of that kind of about so many tokens of the served model."""
    sample = MAKERS[kind](random.Random(0), SAMPLE_BYTES, 1).text
    return int(tokens * (len(sample.encode()) / client.count_tokens(sample)))


def _deal(facts: Sequence[Fact], *counts: int) -> list[list[Fact]]:
    """The facts in parts of so many, and the rest."""
    dealt: list[list[Fact]] = []
    start = 0
    for count in counts:
        dealt.append(list(facts[start : start + count]))
        start += count
    return [*dealt, list(facts[start:])]


def twins(rng: random.Random, facts: Iterable[Fact], taken: Iterable[Fact]) -> list[Fact]:
    """TWINS facts for each whose keys differ from its key in one word or number only."""
    keys = {canonical(fact.key) for fact in taken}
    values = {fact.value for fact in taken}
    found: list[Fact] = []
    for fact in facts:
        mine = 0
        while mine < TWINS:
            twin = _with_value(rng, make_fact(rng, _near(rng, fact.key), ""))
            if canonical(twin.key) not in keys and twin.value not in values:
                keys.add(canonical(twin.key))
                values.add(twin.value)
                found.append(twin)
                mine += 1
    return found


def _near(rng: random.Random, key: str) -> str:
    """`key` with its last or first part replaced."""
    mark = next(mark for mark in " -_" if mark in key)
    parts = key.split(mark)
    place = rng.choice((-1, -1, 0))
    new = str(rng.randrange(10, 1000)) if parts[place].isdigit() else rng.choice(EVALUATION_WORDS)
    parts[place] = new.title() if parts[place].istitle() else new
    return mark.join(parts)


def _with_value(rng: random.Random, fact: Fact) -> Fact:
    """A fact about the same key with a new value."""
    made = make_fact(rng, fact.key, make_value(rng, EVALUATION_WORDS))
    return Fact(made.key, made.value, made.sentence, made.question, made.expected)


def _fill(rng: random.Random, size: int, facts: Sequence[Fact]) -> str:
    """Library text of about `size` bytes in all, with the facts in it."""
    sentences = [fact.sentence for fact in facts]
    return plant(rng, library_text(rng, room(sentences, size), "held_out"), sentences)


def _ask(task: str, facts: Iterable[Fact], text: str) -> Iterable[Question]:
    for fact in facts:
        depth = text.index(fact.sentence) / len(text) if fact.value else None
        yield Question(task, fact.question, (fact.value,) if fact.value else (), depth)
