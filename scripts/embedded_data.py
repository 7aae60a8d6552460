"""Training sequences of the embedded model: filler text, facts, and questions that share one document.

A sequence is: begin token, document, then for each question: question token, question, answer token, answer, end token.
"""

import ast
import math
import random
import re
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

from longleaf.demo import facts as words
from longleaf.demo.facts import Fact
from longleaf.demo.haystack import library_files

BEGIN, QUESTION, ANSWER, END, PAD = range(256, 261)
GAP = 110
"""Filler bytes kept between the last fact and the questions: nearer facts are reached by the local layers alone."""
LETTERS = ("bcdfghjklmnprstvwz", "aeiou", "çñšžłß", "áéíöüø", "бвгдклмнпрст", "аеиоу")


@dataclass(frozen=True)
class Phase:
    """What the sequences of one part of the training look like."""

    length: int
    """Tokens per sequence."""
    batch: int
    questions: int
    most_facts: int
    repeats: float
    """Share of sequences that repeat spans of text and ask nothing."""
    made_up: float
    """Share of those whose text is made-up words, which nothing but looking up can predict."""
    templates: int
    log_copies: float
    """Largest ln R: how many copies of itself a filler token counts for."""
    decisive: float
    """Weight of the first byte of a value, which picks the fact; those after it only copy."""


@dataclass
class Batch:
    """Tensors of one step."""

    ids: Tensor
    """[batch, length + 1]"""
    segments: Tensor
    """[batch, length]: 0 in the document, i in the i-th question and its answer."""
    bias: Tensor
    """[batch, segments, length]: added to the global layer's scores, by the segment of the query and by key."""
    weights: Tensor
    """[batch, length]: weight of predicting the next token."""


def docstrings(source: str) -> list[str]:
    """Documentation strings of a module, its classes and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return [text for text in found if text and len(text) > 40]


def filler_texts() -> tuple[bytes, bytes]:
    """Prose (documentation strings and topics) and source code of the files that training may read."""
    prose = [str(text) for text in topics.values()]
    code: list[str] = []
    for path in library_files("train"):
        if path.name == "topics.py":
            continue
        try:
            source = path.read_text(encoding="utf-8")
            prose += docstrings(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        code.append(source)
    random.Random(0).shuffle(prose)
    return "\n\n".join(prose).encode(), "\n".join(code).encode()


def made_up_word(rng: random.Random) -> str:
    """A word of two to four syllables, one in six with letters outside ASCII."""
    script = 0 if rng.random() < 0.83 else rng.choice((2, 4))
    syllables = rng.randint(2, 4 if script == 0 else 3)
    return "".join(rng.choice(LETTERS[script]) + rng.choice(LETTERS[script + 1]) for _ in range(syllables))


class Sampler:
    """Draws sequences from a seeded generator."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.prose, self.code = filler_texts()
        found = set(re.findall(r"\b[a-z]{4,10}\b", self.prose.decode()))
        self.common = tuple(sorted(found - set(words.HELD_OUT_WORDS)))

    def filler(self, size: int) -> bytes:
        """`size` bytes of prose or code that begin and end at a UTF-8 character."""
        source = self.prose if self.rng.random() < 0.5 else self.code
        start = self.rng.randrange(len(source) - size - 1)
        text = source[start : start + size].decode(errors="ignore").encode()
        return text + b"\n" * (size - len(text))

    def made_up_text(self, size: int) -> bytes:
        """`size` bytes of words, numbers and hexadecimal digits in no order."""
        text = b""
        while len(text) < size:
            number = str(self.rng.randrange(10**6)), f"{self.rng.getrandbits(24):06x}"
            text += self.rng.choice((self.word(), self.word(), *number)).encode() + self.rng.choice(
                (b" ", b" ", b"\n", b": ")
            )
        return text[:size]

    def word(self) -> str:
        kind = self.rng.random()
        if kind < 0.4:
            return self.rng.choice(words.TRAIN_WORDS)
        return self.rng.choice(self.common) if kind < 0.7 else made_up_word(self.rng)

    def key(self, easy: bool) -> str:
        """A key in the demo's forms, or a single name, hexadecimal or mixed identifier."""
        choices = tuple(self.word() for _ in range(8))
        if easy or self.rng.random() < 0.75:
            return words.make_key(self.rng, choices)
        forms = (
            choices[0].title() + " " + made_up_word(self.rng).title(),
            f"{self.rng.getrandbits(32):08x}",
            f"{choices[0][:3].upper()}{self.rng.randrange(10**4)}",
            " ".join(choices[:3])[:32],
        )
        return self.rng.choice(forms)

    def near(self, key: str) -> str:
        """A key with the same beginning, or the same end, as `key`."""
        parts = re.split(r"([ _-])", key)
        if len(parts) < 3:
            return key + str(self.rng.randrange(10))
        place = -1 if self.rng.random() < 0.7 else 0
        old = parts[place]
        new = str(self.rng.randrange(10, 1000)) if old.isdigit() else self.word()
        parts[place] = new.title() if old.istitle() else new
        return "".join(parts)

    def fact(self, key: str, phase: Phase) -> Fact:
        value = words.make_value(self.rng, tuple(self.word() for _ in range(8)))
        fact = words.make_fact(self.rng, key, value, self.rng.randrange(phase.templates))
        question = fact.question
        if phase.templates > 1 and self.rng.random() < 0.25:
            question = self.rng.choice(("What is {}?", "{}?", "Find {}.", "What does it say about {}?")).format(key)
        return Fact(key, value, fact.sentence, question[:80], fact.expected)

    def facts(self, phase: Phase) -> list[Fact]:
        """Facts of different keys, in a third of the draws with near-duplicate keys."""
        count = self.rng.randint(1, phase.most_facts)
        keys = [self.key(phase.templates == 1)]
        near = self.rng.random() < 0.35
        while len(keys) < count:
            key = self.near(self.rng.choice(keys)) if near else self.key(phase.templates == 1)
            if key not in keys:
                keys.append(key)
        return [self.fact(key, phase) for key in keys]

    def questions(self, phase: Phase, present: list[Fact]) -> list[tuple[Fact, int]]:
        """Questions with the index of the fact each asks for, or -1 for an absent key."""
        asked: list[tuple[Fact, int]] = []
        for _ in range(phase.questions):
            if self.rng.random() < 0.7:
                index = self.rng.randrange(len(present))
                asked.append((present[index], index))
                continue
            near = self.rng.random() < 0.4
            key = self.near(self.rng.choice(present).key) if near else self.key(phase.templates == 1)
            if all(key != fact.key for fact in present):
                fact = self.fact(key, phase)
                asked.append((words.without_value(fact), -1))
        return asked

    def document(self, size: int, present: list[Fact]) -> tuple[bytes, list[int]]:
        """`size` bytes with the facts as lines or sentences, and for each byte its fact's index or -1."""
        sentences: list[bytes] = []
        for fact in present:
            before, after = self.rng.choice((("\n", "\n"), ("\n", "\n"), ("\n\n", "\n\n"), (" ", " ")))
            sentences.append(f"{before}{fact.sentence}{after}".encode())
        while sum(map(len, sentences)) > size - GAP - 8 and len(sentences) > 1:
            sentences.pop()
        present[len(sentences) :] = []
        filler = self.filler(size - sum(map(len, sentences)))
        latest = max(len(filler) - GAP, 0)
        places = sorted(self.rng.randint(0, latest) for _ in sentences)
        order = self.rng.sample(range(len(sentences)), len(sentences))
        data, owners, last = b"", [], 0
        for place, index in zip(places, order, strict=True):
            data += filler[last:place] + sentences[index]
            owners += [-1] * (place - last) + [index] * len(sentences[index])
            last = place
        return data + filler[last:], owners + [-1] * (len(filler) - last)

    def sequence(self, phase: Phase) -> tuple[list[int], list[int], list[list[float]], list[float]]:
        """Ids, segments, bias rows by segment, and weights of one sequence of `phase.length` + 1 ids."""
        if self.rng.random() < phase.repeats:
            return self.repetition(phase)
        present = self.facts(phase)
        asked = self.questions(phase, present)
        size = phase.length - sum(len(f.question.encode()) + len(f.expected.encode()) + 3 for f, _ in asked)
        data, owners = self.document(size, present)
        asked = [(fact, index) for fact, index in asked if index < len(present)]
        ids, segments, weights = [BEGIN, *data], [0] * (len(data) + 1), [0.1] * len(data)
        for number, (fact, _) in enumerate(asked, start=1):
            question, answer = fact.question.encode(), fact.expected.encode()
            ids += [QUESTION, *question, ANSWER, *answer, END]
            segments += [number] * (len(question) + len(answer) + 3)
            echo = len(f"{fact.key} is ".encode())
            weights += [0.0, *[0.1] * len(question), 0.0]
            weights += [phase.decisive if i == echo else 1.5 if i < echo else 2.0 for i in range(len(answer) + 1)]
        missing = phase.length + 1 - len(ids)
        ids += [PAD] * missing
        segments += [phase.questions + 1] * missing
        weights += [0.0] * missing
        rows = [[0.0] * phase.length]
        copies = self.rng.uniform(0, phase.log_copies)
        rows += [self.bias_row(owners, index, copies, phase.length) for _, index in asked]
        rows += [rows[0]] * (phase.questions + 2 - len(rows))
        return ids, segments[: phase.length], rows, weights

    def bias_row(self, owners: list[int], asked: int, copies: float, length: int) -> list[float]:
        """ln R for filler keys, a random share of it for other facts' keys, none for the asked fact's."""
        other = self.rng.random() * min(copies, math.log(400))
        by_owner = {-1: copies, asked: 0.0} if asked >= 0 else {-1: copies}
        row = [0.0, *(by_owner.get(owner, other) for owner in owners)]
        return row + [0.0] * (length - len(row))

    def repetition(self, phase: Phase) -> tuple[list[int], list[int], list[list[float]], list[float]]:
        """Text whose second half is made of spans of its first half: it teaches to look up and to copy."""
        made_up = phase.made_up > 0 and self.rng.random() < phase.made_up
        first = self.made_up_text(phase.length // 2) if made_up else self.filler(phase.length // 2)
        second = b""
        while len(second) < phase.length - len(first):
            start = self.rng.randrange(len(first) - 24)
            second += first[start : start + self.rng.randint(16, 64)]
        ids = [BEGIN, *first, *second][: phase.length + 1]
        weights = [0.1 if i < len(first) else 0.5 for i in range(phase.length)]
        return ids, [0] * phase.length, [[0.0] * phase.length] * (phase.questions + 2), weights

    def batch(self, phase: Phase) -> Batch:
        """One step's sequences."""
        drawn = [self.sequence(phase) for _ in range(phase.batch)]
        ids, segments, bias, weights = zip(*drawn, strict=True)
        return Batch(torch.tensor(ids), torch.tensor(segments), torch.tensor(bias), torch.tensor(weights))


def attention_mask(batch: Batch) -> Tensor:
    """What to add to the global layer's scores, [batch, 1, length, length].

    A question sees the document and itself, not the other questions, so one document serves several.
    """
    segments = batch.segments
    query, key = segments[:, :, None], segments[:, None, :]
    rows = batch.bias.gather(1, query.expand(-1, -1, segments.shape[1]))
    causal = torch.ones(segments.shape[1], segments.shape[1], dtype=torch.bool).tril()
    return rows.masked_fill(~(causal & ((key == 0) | (key == query))), -math.inf)[:, None]
