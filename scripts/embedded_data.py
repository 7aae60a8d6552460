"""Training sequences of the embedded model: filler text, facts, and questions that share one document.

A sequence is: begin token, document, then for each question: question token, question, answer token, answer, end token.
In the global layer a question sees the documents of all sequences of its batch: every step looks a key up among the
facts and the text of many documents.
"""

import math
import random
from dataclasses import dataclass, fields

import torch
from embedded_bare import Bare, BareDocuments
from embedded_facts import Facts
from embedded_phase import Phase
from embedded_text import Text
from torch import Tensor

from longleaf.demo.facts import Fact

BEGIN, QUESTION, ANSWER, END, PAD = range(256, 261)
GAP = 110
"""Filler bytes between the last fact and the questions: the local layers can reach nearer facts."""
FIRST_BYTE_WEIGHT = 8.0
"""Weight of the first byte of a value, the largest of all weights."""
ALONE = 0.3
"""Share of the lists that are seen in isolation, as all documents of a few facts are."""


FILLER, OUTSIDE = -1, -2
"""In place of the index of a fact: text of no fact; the begin token, questions and padding."""


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
    is_alone: Tensor
    """[batch]: its questions see no other document."""


@dataclass
class Sequence:
    """One row of a batch."""

    ids: list[int]
    segments: list[int]
    owners: list[int]
    asked: list[int]
    copies: list[tuple[float, float]]
    weights: list[float]
    is_alone: bool = False


def answer_weights(answer: bytes, echo: int, is_last: bool = False) -> list[float]:
    """Weights of predicting each byte of an answer and the end token; the value begins after `echo` bytes.

    The value's first byte decides which fact is read. Other values may share a prefix, and diverge at the edges of
    words and at each digit.
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
        self.text = Text(self.rng)
        self.facts = Facts(self.rng, self.text)
        self.bare = BareDocuments(self.rng, self.text, self.facts)

    def document(self, size: int, present: list[Fact]) -> tuple[bytes, list[int]]:
        """`size` bytes with the facts as lines or sentences, and for each byte its fact's index or -1."""
        sentences: list[bytes] = []
        for fact in present:
            before, after = self.rng.choice((("\n", "\n"), ("\n", "\n"), ("\n\n", "\n\n"), (" ", " ")))
            sentences.append(f"{before}{fact.sentence}{after}".encode())
        while sum(map(len, sentences)) > size - GAP - 8 and len(sentences) > 1:
            sentences.pop()
        present[len(sentences) :] = []
        filler = self.text.filler(size - sum(map(len, sentences)))
        latest = max(len(filler) - GAP, 0)
        places = sorted(self.rng.randint(0, latest) for _ in sentences)
        order = self.rng.sample(range(len(sentences)), len(sentences))
        data, owners, last = b"", [], 0
        for place, index in zip(places, order, strict=True):
            data += filler[last:place] + sentences[index]
            owners += [-1] * (place - last) + [index] * len(sentences[index])
            last = place
        return data + filler[last:], owners + [-1] * (len(filler) - last)

    def sequence(self, phase: Phase) -> Sequence:
        """One sequence of `phase.length` + 1 ids."""
        kind = self.rng.random() if phase.bare or phase.lists else 1.0
        if kind < phase.bare:
            return self.bare_sequence(self.bare.few(phase), True, phase)
        if kind < phase.bare + phase.lists:
            return self.bare_sequence(self.bare.numbered(phase), self.rng.random() < ALONE, phase)
        if self.rng.random() < phase.repeats:
            return self.repetition(phase)
        present = self.facts.document_facts(phase)
        requested = self.facts.questions(phase, present)
        size = phase.length - sum(len(f.question.encode()) + len(f.expected.encode()) + 3 for f, _ in requested)
        data, owners = self.document(size, present)
        return self.asked(data, owners, [(fact, index) for fact, index in requested if index < len(present)], phase)

    def bare_sequence(self, document: Bare, is_alone: bool, phase: Phase) -> Sequence:
        """The document, cut if it is too long, with as many of its questions as there is room for."""
        room = phase.length - len(document.data) - 1
        retained: list[tuple[Fact, int]] = []
        for fact, index in document.asked:
            room -= len(fact.question.encode()) + len(fact.expected.encode()) + 3
            retained += [(fact, index)] if room >= 0 else []
        found = self.asked(document.data[: phase.length], document.owners[: phase.length], retained, phase)
        found.is_alone = is_alone
        if is_alone:  # no other document competes with this one
            found.copies = [(0.0, 0.0)] * len(found.copies)
        return found

    def asked(self, data: bytes, owners: list[int], asked: list[tuple[Fact, int]], phase: Phase) -> Sequence:
        """A document and its questions, padded."""
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
        first = self.text.made_up_text(phase.length // 2) if is_made_up else self.text.filler(phase.length // 2)
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
        self.facts.start_batch(phase)
        if phase.lists:
            self.bare.start_batch()
        rows = [self.sequence(phase) for _ in range(phase.batch)]
        names = (field.name for field in fields(Batch))
        return Batch(**{name: torch.tensor([getattr(row, name) for row in rows]) for name in names})


def predicted(batch: Batch) -> Tensor:
    """Indices in the flattened batch of tokens whose successor has a weight."""
    return batch.weights.flatten().nonzero()[:, 0]


def attention_mask(batch: Batch, rows: Tensor) -> Tensor:
    """Bias for the global layer's scores of the tokens at `rows`, [rows, batch * length].

    A token of a question sees its own question, and the documents of the whole batch or only its own; a token of a
    document sees the earlier tokens of the document. Documents of other sequences have no begin token: there is one in
    a prompt.
    """
    length = batch.ids.shape[1] - 1
    segments, owners = batch.segments.flatten(), batch.owners.flatten()
    sequences = torch.arange(len(segments)) // length
    segment, sequence = segments[rows], sequences[rows]
    same = sequence[:, None] == sequences[None]
    own = same & (segment[:, None] == segments[None]) & (torch.arange(len(segments))[None] <= rows[:, None])
    others = (owners[None] != OUTSIDE) & ~batch.is_alone[sequence][:, None]
    read = (segment[:, None] > 0) & (segments[None] == 0) & (same | others)
    copies = batch.copies[sequence, segment]
    bias = torch.where(owners[None] == FILLER, copies[:, :1], copies[:, 1:])
    requested = same & (owners[None] == batch.asked[sequence, segment][:, None])
    bias = bias.masked_fill(own | requested | (owners[None] == OUTSIDE), 0.0)
    return bias.masked_fill(~(own | read), -math.inf)
