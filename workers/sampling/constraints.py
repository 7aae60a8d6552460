"""Grammars of the sequences that this rank samples: their states, and the tokens that they allow."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longleaf.errors import ModelRefused
from longleaf.rank_protocol.step import GrammarTerms, Row

if TYPE_CHECKING:
    from longleaf.grammars.matcher import GrammarMatcher
    from longleaf.grammars.vocabulary import GrammarVocabulary

MAX_COMPILED = 32
"""Compiled grammars that are kept for later answers of the same tenant."""
Vocabulary = Callable[[], "GrammarVocabulary"]
log = logging.getLogger(__name__)


def no_vocabulary() -> "GrammarVocabulary":
    raise ModelRefused("this rank has no vocabulary for grammars")


class VocabularyLoader:
    """Reads the vocabulary of a model folder in a thread, because that may take a second, which no step should wait
    for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._found: GrammarVocabulary | None = None
        self._refusal = "the vocabulary was not read"

    def start(self) -> None:
        """Begins to read. Idempotent."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="vocabulary", daemon=True)
                self._thread.start()

    def _read(self) -> None:
        try:
            # checks on GPU machines run samplers without llguidance
            from longleaf.grammars.vocabulary import read_vocabulary

            self._found = read_vocabulary(self._folder)
        except Exception as error:
            self._refusal = str(error)
            log.info("constraints are not supported: %s", error)

    def get(self) -> "GrammarVocabulary":
        """The vocabulary. Waits for it. Raises ModelRefused."""
        self.start()
        assert self._thread is not None
        self._thread.join()
        if self._found is None:
            raise ModelRefused(self._refusal)
        return self._found


class Constraints:
    """The grammars of sequences. A sequence without a grammar, or whose answer has ended, is unconstrained: the
    coordinator plans a row ahead, whose token it drops.
    """

    def __init__(self, vocabulary: Vocabulary = no_vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[tuple[str, str], GrammarMatcher] = OrderedDict()
        """Matchers at the start of an answer, by tenant and grammar."""
        self._matchers: dict[int, GrammarMatcher] = {}
        self.failed: dict[int, str] = {}
        """The reason for each sequence whose grammar allows no token: no further token is sampled for it."""

    def begin(self, rows: Iterable[Row]) -> None:
        """Creates the states of the sequences that begin or continue with these rows."""
        for row in rows:
            if row.terms is not None:
                self.forget([row.sequence])
                if row.terms.grammar is not None:
                    self._begin(row.sequence, row.terms.grammar)

    def _begin(self, sequence: int, terms: GrammarTerms) -> None:
        try:
            matcher = self._start_of(terms).copy(terms.end_tokens)
        except ModelRefused as error:
            self.failed[sequence] = str(error)
            return
        matcher.replay(terms.generated)
        self._matchers[sequence] = matcher

    def _start_of(self, terms: GrammarTerms) -> "GrammarMatcher":
        from longleaf.grammars.matcher import GrammarMatcher

        key = terms.tenant, terms.grammar
        if key not in self._compiled:
            self._compiled[key] = GrammarMatcher(self._vocabulary(), terms.grammar, ())
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def is_constrained(self, sequence: int) -> bool:
        """Whether the next token of a sequence is constrained."""
        matcher = self._matchers.get(sequence)
        return matcher is not None and not matcher.has_ended

    def holds(self, sequence: int) -> bool:
        """Whether a sequence has a grammar."""
        return sequence in self._matchers or sequence in self.failed

    def can_continue(self, sequence: int, vocabulary_size: int) -> bool:
        """Whether the grammar of a sequence, if any, allows a token. Otherwise the reason is in `failed`."""
        if self.is_constrained(sequence):
            matcher = self._matchers[sequence]
            matcher.allowed(vocabulary_size)
            self._check(sequence, matcher)
        return sequence not in self.failed

    def allowed(self, sequence: int, vocabulary_size: int) -> Tensor | None:
        """The tokens that may follow, [V], bool; None if all may."""
        if not self.is_constrained(sequence):
            return None
        return torch.from_numpy(self._matchers[sequence].allowed(vocabulary_size))

    def allowed_behind(self, sequence: int, drafts: Sequence[int], vocabulary_size: int) -> list[Tensor]:
        """The tokens that may follow each of the drafts of a constrained sequence, [V], bool; none may follow one that
        ends the answer or is refused by the grammar.
        """
        masks = self._matchers[sequence].allowed_behind(drafts, vocabulary_size)
        return [torch.from_numpy(mask) for mask in masks]

    def has_ended(self, sequence: int) -> bool:
        """Whether a sequence has a grammar and its answer is complete."""
        matcher = self._matchers.get(sequence)
        return matcher is not None and matcher.has_ended

    def accept(self, sequence: int, token_id: int) -> None:
        """Adds a sampled token to the answer of a sequence."""
        if self.is_constrained(sequence):
            matcher = self._matchers[sequence]
            matcher.accept(token_id)
            self._check(sequence, matcher)

    def _check(self, sequence: int, matcher: "GrammarMatcher") -> None:
        if matcher.error:
            self.failed[sequence] = matcher.error

    def completed(self, rows: Iterable[Row]) -> tuple[int, ...]:
        """Sequences whose answer is complete."""
        return tuple(row.sequence for row in rows if self.has_ended(row.sequence))

    def forced(self, rows: Iterable[Row]) -> dict[int, tuple[int, ...]]:
        """For each constrained sequence, tokens of the text that must follow, if any."""
        states = ((row.sequence, self._matchers.get(row.sequence)) for row in rows)
        found = ((sequence, tuple(matcher.forced())) for sequence, matcher in states if matcher is not None)
        return {sequence: token_ids for sequence, token_ids in found if token_ids}

    def failures(self, rows: Iterable[Row]) -> dict[int, str]:
        """The sequences without a token because of their grammar, and the reasons."""
        return {row.sequence: self.failed[row.sequence] for row in rows if row.sequence in self.failed}

    def forget(self, sequences: Iterable[int]) -> None:
        """Drops the state of sequences that have ended."""
        for sequence in sequences:
            self._matchers.pop(sequence, None)
            self.failed.pop(sequence, None)

    def clear(self) -> None:
        """Drops the state of all sequences. Compiled grammars remain."""
        self._matchers.clear()
        self.failed.clear()


def mask_of(constraints: Constraints, rows: Sequence[Row], vocabulary_size: int) -> Tensor | None:
    """The allowed tokens at the positions of rows and their drafts, [R, V], bool; None if no row is constrained. Failed
    sequences are not constrained.
    """
    if not any(constraints.is_constrained(row.sequence) for row in rows):
        return None
    everything = torch.ones(vocabulary_size, dtype=torch.bool)
    masks: list[Tensor] = []
    for row in rows:
        mask = None
        if constraints.can_continue(row.sequence, vocabulary_size):
            mask = constraints.allowed(row.sequence, vocabulary_size)
        if mask is None:
            masks += [everything] * (1 + len(row.draft_ids))
            continue
        masks.append(mask)
        if row.draft_ids:
            masks += constraints.allowed_behind(row.sequence, row.draft_ids, vocabulary_size)
    return torch.stack(masks)
