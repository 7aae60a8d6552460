"""Documents that consist almost only of facts: a few facts, or a list of numbered keys.

The model must see them in isolation: among the documents of a batch nothing marks the end of a short one.
"""

import random
from dataclasses import dataclass

import embedded_wording as wording
from embedded_facts import Facts
from embedded_phase import Phase
from embedded_text import Text

from longleaf.demo.facts import Fact, without_value
from longleaf.demo.haystack import canonical

COUNTS = (1, 1, 2, 2, 3, 4, 5, 6, 8, 10)
STEMS = ("item", "entry", "key", "row", "line", "no")
MARKS = ("-", "-", "-", " ", "_", "", ".")
DIGITS = (1, 1, 1, 3, 4, 5)
"""A number is padded to so many."""
FILLER = -1


@dataclass
class Bare:
    """A document's bytes, for each the index of its fact or FILLER, and questions with the index of theirs or -1."""

    data: bytes
    owners: list[int]
    asked: list[tuple[Fact, int]]

    def add(self, text: bytes, owner: int = FILLER) -> None:
        self.data += text
        self.owners += [owner] * len(text)


class BareDocuments:
    """Draws such documents; those of a batch number the keys of one stem."""

    def __init__(self, rng: random.Random, text: Text, facts: Facts) -> None:
        self.rng = rng
        self.text = text
        self.facts = facts
        self.stem, self.mark, self.digits = STEMS[0], MARKS[0], DIGITS[0]

    def start_batch(self) -> None:
        """Chooses how the batch's lists name their keys."""
        stem = self.rng.choice((self.text.new_word(), *STEMS))
        self.stem = stem.title() if self.rng.random() < 0.2 else stem
        self.mark, self.digits = self.rng.choice(MARKS), self.rng.choice(DIGITS)

    def filler(self, most_log: float) -> bytes:
        """Text whose length's logarithm is even up to `most_log`, to base 10."""
        return self.text.filler(int(10 ** self.rng.uniform(0, most_log)))

    def few(self, phase: Phase) -> Bare:
        """One to ten facts, with nothing or a little text around them."""
        count, is_near = self.rng.choice(COUNTS), self.rng.random() < 0.3
        keys = [self.facts.new_key(phase, ())]
        keys += [self.facts.new_key(phase, keys if is_near else ()) for _ in range(count - 1)]
        present = [self.facts.fact(key, phase) for key in keys]
        found, has_filler = Bare(b"", [], self.facts.questions(phase, present)), self.rng.random() < 0.5
        for i, fact in enumerate(present):
            if has_filler and self.rng.random() < 0.5:
                found.add(self.filler(2.5) + b"\n")
            end = self.rng.choice((b"\n", b"\n", b"\n", b"\n\n", b" "))
            is_open = i == count - 1 and self.rng.random() < 0.5
            found.add(fact.sentence.encode() + (b"" if is_open else end), i)
        if self.rng.random() < 0.4:
            found.add(b"\n" + self.filler(2.7))
        return found

    def numbered(self, phase: Phase) -> Bare:
        """A list of lines whose keys differ only in their numbers."""
        link, has_numbers = self.rng.choice(wording.BARE_LINKS), self.rng.random() < 0.7
        first = self.rng.choice((1, 1, self.rng.randrange(1000), self.rng.randrange(5000)))
        keys = [self.key(number) for number in range(first, first + self.rng.randint(5, 70))]
        keys = [key for key in keys if canonical(key) not in self.facts.taken]
        self.facts.taken.update(map(canonical, keys))
        present = [self.line(key, link, has_numbers, phase) for key in keys]
        found = Bare(b"", [], [self.question(present, phase) for _ in range(phase.questions)])
        if self.rng.random() < 0.3:
            found.add(self.filler(1.8) + b"\n")
        room = phase.length - sum(len(f.question.encode()) + len(f.expected.encode()) + 3 for f, _ in found.asked) - 8
        retained = 0
        while retained < len(present) and len(found.data) + len(present[retained].sentence.encode()) < room:
            found.add(present[retained].sentence.encode() + b"\n", retained)
            retained += 1
        found.asked = [(fact, index) for fact, index in found.asked if index < retained]
        if self.rng.random() < 0.5 and len(found.data) + 1 < room:
            found.add(self.text.filler(self.rng.randint(1, room - len(found.data))))
        return found

    def key(self, number: int) -> str:
        return f"{self.stem}{self.mark}{number:0{self.digits}d}"

    def line(self, key: str, link: str, has_number: bool, phase: Phase) -> Fact:
        value = str(self.rng.randrange(100, 10 ** self.rng.randint(3, 6))) if has_number else self.facts.value()
        question = self.facts.fact(key, phase).question
        return Fact(key, value, f"{key}{link}{value}", question, f"{key} is {value}")

    def question(self, present: list[Fact], phase: Phase) -> tuple[Fact, int]:
        """Of four in five lists' keys, else of a number that the list does not have."""
        if present and self.rng.random() < 0.8:
            index = self.rng.randrange(len(present))
            return present[index], index
        while canonical(key := self.key(self.rng.randrange(1, 9999))) in self.facts.taken:
            pass
        self.facts.taken.add(canonical(key))
        return without_value(self.facts.fact(key, phase)), -1
