"""Facts that the embedded model is trained on, and questions for them."""

import random
import re
from collections.abc import Sequence

import embedded_wording as wording
from embedded_phase import Phase
from embedded_text import Text, made_up_word

from longleaf.demo import facts as words
from longleaf.demo.facts import Fact
from longleaf.demo.haystack import canonical

MOST_BYTES = 88
"""Of a question: the global layer sees its key only through the local layers."""


class Facts:
    """Draws the facts of one batch after the other. Within a batch no key is there twice."""

    def __init__(self, rng: random.Random, text: Text) -> None:
        self.rng = rng
        self.text = text
        self.numbers: list[str] = []
        """Values of the batch that hold digits."""
        self.taken: set[str] = set()
        """Keys of the batch, in their canonical spelling."""

    def start_batch(self, phase: Phase) -> None:
        """Chooses the words that the batch's keys and values share."""
        self.numbers, self.taken = [], set()
        new_word = self.text.new_word
        shared = (8, 40) if phase.is_last else (15, 60)
        self.text.pool = () if phase.easy else tuple(new_word() for _ in range(self.rng.randint(*shared)))

    def key(self, easy: bool, doubled: float) -> str:
        """A key in the demo's forms, or a name, an identifier, a phrase; `doubled` is the share that repeats a word."""
        choices = tuple(self.text.word() for _ in range(8))
        if doubled and self.rng.random() < doubled:
            choices = choices[:1] * 8
        if easy or self.rng.random() < 0.7:
            return words.make_key(self.rng, choices)
        forms = (
            choices[0].title() + " " + made_up_word(self.rng).title(),
            f"{self.rng.getrandbits(32):08x}",
            f"{choices[0][:3].upper()}{self.rng.randrange(10**4)}",
            " ".join(choices[:3])[:32],
            "the " + choices[0],
            f"{choices[0]}.{choices[1]}",
            choices[0] + choices[1].title(),
            str(self.rng.randrange(10**4, 10**9)),
        )
        return self.rng.choice(forms)

    def near(self, key: str) -> str:
        """A key with the same beginning, or the same end, as `key`."""
        parts = re.split(r"([ _-])", key)
        if len(parts) < 3:
            return key + str(self.rng.randrange(10))
        place = -1 if self.rng.random() < 0.7 else 0
        old = parts[place]
        new = str(self.rng.randrange(10, 1000)) if old.isdigit() else self.text.word()
        parts[place] = new.title() if old.istitle() else new
        return "".join(parts)

    def value(self) -> str:
        """A value in the demo's forms or of one to three words; some numbers begin like another of the batch."""
        choices = tuple(self.text.word() for _ in range(3))
        kind = self.rng.random()
        if kind > 0.7:
            return " ".join(choices[: self.rng.choice((1, 2, 2, 2, 3))])
        value = words.make_value(self.rng, choices)
        if self.numbers and kind < 0.15:
            other = self.rng.choice(self.numbers)
            value = other[: self.rng.randint(2, len(other) - 1)] + str(self.rng.randrange(10, 10**4))
        if value[0].isdigit() and len(value) < 16:
            self.numbers.append(value)
        return value

    def question(self, attribute: str, key: str, more: bool) -> str:
        """A question for `key` that is short enough."""
        while True:
            text = wording.question(self.rng, attribute, key, more)
            if len(text.encode()) <= MOST_BYTES:
                return text

    def fact(self, key: str, phase: Phase) -> Fact:
        choices = tuple(self.text.word() for _ in range(8))
        value = self.value()
        attribute = (
            self.rng.choice(words.ATTRIBUTES)
            if self.rng.random() < 0.6
            else " ".join(choices[1 : self.rng.randint(2, 3)])
        )
        if phase.easy:
            sentence, question = f"The {attribute} of {key} is {value}.", f"What is the {attribute} of {key}?"
        else:
            sentence = wording.statement(self.rng, attribute, key, value)
            question = self.question(attribute, key, phase.is_last)
        return Fact(key, value, sentence, question, f"{key} is {value}")

    def new_key(self, phase: Phase, like: Sequence[str]) -> str:
        """A key that no document of the batch has, similar to one of `like` if there is any; takes it."""
        while True:
            key = self.near(self.rng.choice(like)) if like else self.key(phase.easy, 0.06 if phase.is_last else 0.0)
            if canonical(key) not in self.taken:
                self.taken.add(canonical(key))
                return key

    def document_facts(self, phase: Phase) -> list[Fact]:
        """Facts of different keys, in two fifths of the draws with near-duplicate keys."""
        near = self.rng.random() < 0.4
        keys = [self.new_key(phase, ())]
        for _ in range(self.rng.randint(0, phase.most_facts - 1)):
            keys.append(self.new_key(phase, keys if near else ()))
        return [self.fact(key, phase) for key in keys]

    def questions(self, phase: Phase, present: list[Fact]) -> list[tuple[Fact, int]]:
        """Questions with the index of the fact each asks for, or -1 for an absent key."""
        requested: list[tuple[Fact, int]] = []
        for _ in range(phase.questions):
            if self.rng.random() < 0.65:
                index = self.rng.randrange(len(present))
                requested.append((present[index], index))
                continue
            like = [fact.key for fact in present] if self.rng.random() < 0.4 else []
            requested.append((words.without_value(self.fact(self.new_key(phase, like), phase)), -1))
        return requested
