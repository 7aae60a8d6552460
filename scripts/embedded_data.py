"""Training sequences of the embedded model: filler text, facts, and questions that share one document.

A sequence is: begin token, document, then for each question: question token, question, answer token, answer, end token.
In the global layer a question sees the documents of all sequences of its batch: every step looks a key up among the
facts and the text of many documents.
"""

import ast
import math
import random
import re
from collections.abc import Sequence as Choices
from dataclasses import dataclass, fields
from pydoc_data.topics import topics

import embedded_wording as wording
import torch
from torch import Tensor

from longleaf.demo import facts as words
from longleaf.demo.facts import Fact
from longleaf.demo.haystack import canonical, library_files

BEGIN, QUESTION, ANSWER, END, PAD = range(256, 261)
GAP = 110
"""Filler bytes kept between the last fact and the questions: nearer facts are reached by the local layers alone."""
MOST_BYTES = 88
"""Of a question: the global layer sees its key only through the local layers."""
FIRST_BYTE_WEIGHT = 8.0
"""Of the first byte of a value, the largest of all weights."""
LETTERS = ("bcdfghjklmnprstvwz", "aeiou", "çñšžłß", "áéíöüø", "бвгдклмнпрст", "аеиоу")


FILLER, OUTSIDE = -1, -2
"""In place of the index of a fact: text of no fact; the begin token, questions and padding."""


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
    easy: bool
    """One wording, and keys of two words."""
    log_copies: float
    """Largest ln R: how many copies of itself a filler token counts for."""
    is_last: bool = False
    """More questions, keys of one word twice, and more weight on where a repeated key ends."""


@dataclass
class Batch:
    """Tensors of one step; S segments per sequence: the document, questions, padding."""

    ids: Tensor
    """[batch, length + 1]"""
    segments: Tensor
    """[batch, length]: 0 in the document, i in the i-th question and its answer."""
    owners: Tensor
    """[batch, length]: which of its document's facts a token belongs to, FILLER or OUTSIDE."""
    asked: Tensor
    """[batch, S]: the fact that the segment asks for, or -1."""
    copies: Tensor
    """[batch, S, 2]: ln R of filler and of other facts, as the segment sees them."""
    weights: Tensor
    """[batch, length]: weight of predicting the next token."""


@dataclass
class Sequence:
    """One row of a batch."""

    ids: list[int]
    segments: list[int]
    owners: list[int]
    asked: list[int]
    copies: list[tuple[float, float]]
    weights: list[float]


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


def answer_weights(answer: bytes, echo: int, is_last: bool = False) -> list[float]:
    """Weights of predicting each byte of an answer and the end token; the value begins after `echo` bytes.

    The value's first byte decides which fact is read; but other values may begin alike, and where a word of the value
    ends or begins, and at each digit, they go on in another way.
    """
    weights = [4.0] + [1.5] * (echo - 1) + [FIRST_BYTE_WEIGHT]
    if is_last:
        key = echo - len(" is ")
        weights[:echo] = [6.0] + [2.0] * (key - 1) + [6.0, 6.0, 2.0, 2.0]
    for i in range(echo + 1, len(answer) + 1):
        inside_word = i < len(answer) and (answer[i - 1 : i + 1].isalpha() or min(answer[i - 1 : i + 1]) >= 0x80)
        weights.append(2.0 if inside_word else 4.0)
    return weights


class Sampler:
    """Draws sequences from a seeded generator."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.prose, self.code = filler_texts()
        found = set(re.findall(r"\b[a-z]{4,10}\b", self.prose.decode()))
        self.common = tuple(sorted(found - set(words.HELD_OUT_WORDS)))
        self.pool: tuple[str, ...] = ()
        """Words that keys and values of the batch share."""
        self.numbers: list[str] = []
        """Values of the batch that hold digits."""

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
        """A word, most often one that other facts of the batch have too."""
        return self.rng.choice(self.pool) if self.pool and self.rng.random() < 0.75 else self.new_word()

    def new_word(self) -> str:
        kind = self.rng.random()
        if kind < 0.4:
            return self.rng.choice(words.TRAIN_WORDS)
        return self.rng.choice(self.common) if kind < 0.7 else made_up_word(self.rng)

    def key(self, easy: bool, doubled: float) -> str:
        """A key in the demo's forms, or a name, an identifier, a phrase; `doubled` is the share that repeats a word."""
        choices = tuple(self.word() for _ in range(8))
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
        new = str(self.rng.randrange(10, 1000)) if old.isdigit() else self.word()
        parts[place] = new.title() if old.istitle() else new
        return "".join(parts)

    def value(self) -> str:
        """A value in the demo's forms or of one to three words; some numbers begin like another of the batch."""
        choices = tuple(self.word() for _ in range(3))
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
        choices = tuple(self.word() for _ in range(8))
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

    def new_key(self, phase: Phase, taken: set[str], like: Choices[str]) -> str:
        """A key that no document of the batch has, similar to one of `like` if there is any; takes it."""
        while True:
            key = self.near(self.rng.choice(like)) if like else self.key(phase.easy, 0.06 if phase.is_last else 0.0)
            if canonical(key) not in taken:
                taken.add(canonical(key))
                return key

    def facts(self, phase: Phase, taken: set[str]) -> list[Fact]:
        """Facts of different keys, in two fifths of the draws with near-duplicate keys."""
        near = self.rng.random() < 0.4
        keys = [self.new_key(phase, taken, ())]
        for _ in range(self.rng.randint(0, phase.most_facts - 1)):
            keys.append(self.new_key(phase, taken, keys if near else ()))
        return [self.fact(key, phase) for key in keys]

    def questions(self, phase: Phase, present: list[Fact], taken: set[str]) -> list[tuple[Fact, int]]:
        """Questions with the index of the fact each asks for, or -1 for an absent key."""
        asked: list[tuple[Fact, int]] = []
        for _ in range(phase.questions):
            if self.rng.random() < 0.65:
                index = self.rng.randrange(len(present))
                asked.append((present[index], index))
                continue
            like = [fact.key for fact in present] if self.rng.random() < 0.4 else []
            asked.append((words.without_value(self.fact(self.new_key(phase, taken, like), phase)), -1))
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

    def sequence(self, phase: Phase, taken: set[str]) -> Sequence:
        """One sequence of `phase.length` + 1 ids; `taken` are the keys of the batch so far."""
        if self.rng.random() < phase.repeats:
            return self.repetition(phase)
        present = self.facts(phase, taken)
        asked = self.questions(phase, present, taken)
        size = phase.length - sum(len(f.question.encode()) + len(f.expected.encode()) + 3 for f, _ in asked)
        data, owners = self.document(size, present)
        asked = [(fact, index) for fact, index in asked if index < len(present)]
        found = Sequence(
            [BEGIN, *data], [0] * (len(data) + 1), [OUTSIDE, *owners], [-1], [(0.0, 0.0)], [0.0] * len(data)
        )
        for fact, index in asked:
            self.add_question(found, fact, index, phase)
        missing = phase.length + 1 - len(found.ids)
        found.ids += [PAD] * missing
        found.segments += [phase.questions + 1] * missing
        found.weights += [0.0] * missing
        return self.fill(found, phase)

    def add_question(self, found: Sequence, fact: Fact, index: int, phase: Phase) -> None:
        """Appends a question and its answer as a segment of their own."""
        question, answer = fact.question.encode(), fact.expected.encode()
        found.ids += [QUESTION, *question, ANSWER, *answer, END]
        found.segments += [len(found.asked)] * (len(question) + len(answer) + 3)
        found.asked.append(index)
        copies = self.rng.uniform(0, phase.log_copies)
        found.copies.append((copies, self.rng.random() * min(copies, math.log(30))))
        found.weights += [0.0] * (len(question) + 2) + answer_weights(
            answer, len(f"{fact.key} is ".encode()), phase.is_last
        )

    def fill(self, found: Sequence, phase: Phase) -> Sequence:
        """The sequence with all its lists at their full lengths."""
        found.owners += [OUTSIDE] * (phase.length - len(found.owners))
        missing = phase.questions + 2 - len(found.asked)
        found.asked += [-1] * missing
        found.copies += [(0.0, 0.0)] * missing
        del found.segments[phase.length :], found.owners[phase.length :], found.weights[phase.length :]
        return found

    def repetition(self, phase: Phase) -> Sequence:
        """Text whose second half is made of spans of its first half: it teaches to look up and to copy.

        In most, the text is made-up words, which nothing but looking up can predict.
        """
        is_made_up = self.rng.random() < 0.6
        first = self.made_up_text(phase.length // 2) if is_made_up else self.filler(phase.length // 2)
        second = b""
        while len(second) < phase.length - len(first):
            start = self.rng.randrange(len(first) - 24)
            second += first[start : start + self.rng.randint(16, 64)]
        ids = [BEGIN, *first, *second][: phase.length + 1]
        weights = [0.1 if i < len(first) else 0.5 for i in range(phase.length)]
        owners = [OUTSIDE, *[FILLER] * (phase.length - 1)]
        return self.fill(Sequence(ids, [0] * phase.length, owners, [-1], [(0.0, 0.0)], weights), phase)

    def batch(self, phase: Phase) -> Batch:
        """One step's sequences."""
        taken: set[str] = set()
        self.pool = () if phase.easy else tuple(self.new_word() for _ in range(self.rng.randint(15, 60)))
        self.numbers = []
        rows = [self.sequence(phase, taken) for _ in range(phase.batch)]
        names = (field.name for field in fields(Batch))
        return Batch(**{name: torch.tensor([getattr(row, name) for row in rows]) for name in names})


def predicted(batch: Batch) -> Tensor:
    """Indices, in the flattened batch, of the tokens whose successor counts."""
    return batch.weights.flatten().nonzero()[:, 0]


def attention_mask(batch: Batch, rows: Tensor) -> Tensor:
    """What to add to the global layer's scores of the tokens at `rows`, [rows, batch * length].

    A token of a question sees the documents of the whole batch and its own question; one of a document sees what comes
    before it there. Documents of other sequences have no begin token: there is one in a prompt.
    """
    length = batch.ids.shape[1] - 1
    segments, owners = batch.segments.flatten(), batch.owners.flatten()
    sequences = torch.arange(len(segments)) // length
    segment, sequence = segments[rows], sequences[rows]
    same = sequence[:, None] == sequences[None]
    own = same & (segment[:, None] == segments[None]) & (torch.arange(len(segments))[None] <= rows[:, None])
    read = (segment[:, None] > 0) & (segments[None] == 0) & (same | (owners[None] != OUTSIDE))
    copies = batch.copies[sequence, segment]
    bias = torch.where(owners[None] == FILLER, copies[:, :1], copies[:, 1:])
    asked = same & (owners[None] == batch.asked[sequence, segment][:, None])
    bias = bias.masked_fill(own | asked | (owners[None] == OUTSIDE), 0.0)
    return bias.masked_fill(~(own | read), -math.inf)
