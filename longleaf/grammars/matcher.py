# pyright: reportMissingTypeStubs=false
"""The state of one answer in its grammar, and the tokens that may follow."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from longleaf.grammars.vocabulary import GrammarVocabulary

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""Whether each id is allowed, [V]."""
LIMITS: dict[str, int] = {
    "max_items_in_row": 500,
    "step_max_items": 10_000,
    "step_lexer_fuel": 50_000,
    "initial_lexer_fuel": 300_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
"""Limits of llguidance on the work for one grammar and for one mask. A mask within them takes at most 10 ms, where
llguidance's own limits allow 250 ms, and the states of an answer take at most 40 MB."""
OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Ends each grammar. Without it, a mask permits only one division of a fixed text into tokens, that of the tokenizer:
with it, all divisions."""
MAX_FORCED, MAX_FORCED_BYTES = 32, 256
"""Tokens of forced text that are reported, and bytes that are divided into tokens."""
SPECIAL = b"\xff"
"""Begins a special token in the bytes that llguidance reports."""
MAX_REASON = 300
"""Characters of a reported error."""
TOO_COMPLEX = "is too complex at this point of the answer"


class GrammarMatcher:
    """Follows the tokens of one answer. After an error, `error` is set, and no token is allowed any more."""

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str, end_tokens: Collection[int]) -> None:
        """`grammar` is in llguidance's dialect of Lark and ends with OPTIONS. `end_tokens` are allowed exactly where
        the answer is complete, even if the grammar permits their text.
        """
        limits: Any = LIMITS
        matcher = LLMatcher(
            vocabulary.tokens, grammar, log_level=0, limits=LLParserLimits(**limits, verbose_errors=False)
        )
        self._set(matcher, vocabulary, tuple(end_tokens))

    def _set(self, matcher: LLMatcher, vocabulary: GrammarVocabulary, end_tokens: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._size = vocabulary.size
        self._end_tokens = end_tokens
        self._mask: Mask | None = None
        self._has_ended = False
        self.error = _first_line(matcher)
        """The reason why the answer cannot continue; empty while it can."""

    def copy(self, end_tokens: Collection[int]) -> "GrammarMatcher":
        """An independent matcher in the same state, for an answer with these end tokens."""
        other = GrammarMatcher.__new__(GrammarMatcher)
        other._set(self._matcher.deep_copy(), self._vocabulary, tuple(end_tokens))
        return other

    @property
    def has_ended(self) -> bool:
        """Whether the last accepted token ended the answer: it is an end token, or no further text is allowed."""
        return self._has_ended

    def replay(self, token_ids: Sequence[int]) -> None:
        """Repeats the tokens of an answer that is to be continued."""
        self._mask = None
        if token_ids and not self._matcher.consume_tokens([*token_ids]):
            self.error = self.error or _first_line(self._matcher) or "does not match the tokens of the answer"

    def allowed(self, size: int) -> Mask:
        """The tokens that may follow, among `size` ids. Sets `error` if there are none."""
        if self._mask is None or len(self._mask) != size:
            self._mask = self._compute(size)
        return self._mask

    def forced(self) -> list[int]:
        """Tokens of the text that must follow, at most MAX_FORCED: the longest ones, from the left. The model may
        choose other tokens for the text.
        """
        if self.error or self._has_ended:
            return []
        forced, _, _ = self._matcher.compute_ff_bytes()[:MAX_FORCED_BYTES].partition(SPECIAL)
        text = forced.decode(errors="ignore")
        return self._vocabulary.tokens.greedy_tokenize(text)[:MAX_FORCED] if text else []

    def allowed_behind(self, drafts: Sequence[int], size: int) -> list[Mask]:
        """The tokens that may follow each of `drafts`, if the ones before it are added to the answer as well. None may
        follow a draft that ends the answer or that is not allowed. The state does not change.
        """
        found, walker, is_open = [self.allowed(size)], self.copy(self._end_tokens), not self.error
        for draft in drafts:
            is_open = is_open and bool(found[-1][draft])
            if is_open:
                walker.accept(draft)
                is_open = not (walker.error or walker.has_ended)
            found.append(walker.allowed(size) if is_open else np.zeros(size, dtype=np.bool_))
        return found[1:]

    def _compute(self, size: int) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        found = np.unpackbits(bits, count=self._size + 1, bitorder="little").view(np.bool_)
        if self._matcher.is_error():
            self.error = self.error or _first_line(self._matcher) or "allows no token of the vocabulary here"
        mask = np.zeros(size, dtype=np.bool_)
        if self.error:
            return mask
        may_end, common = bool(found[self._size]), min(size, self._size)
        mask[:common] = found[:common]
        mask[[token_id for token_id in self._end_tokens if token_id < size]] = may_end
        if not mask.any():
            self.error = "allows no token of the vocabulary here"
        return mask

    def accept(self, token_id: int) -> None:
        """Adds a token to the answer. Sets `error` if it is not allowed."""
        mask, self._mask = self._mask, None
        if mask is not None and not mask[token_id]:
            self.error = self.error or "allows only tokens that the model excludes"
        elif token_id in self._end_tokens:
            self._has_ended = True
        elif not self._matcher.consume_token(token_id):
            self.error = self.error or _first_line(self._matcher) or TOO_COMPLEX
        else:
            self._has_ended = self._matcher.is_stopped() and self._matcher.is_accepting()


def _first_line(matcher: LLMatcher) -> str:
    """The reason of an error, in one line."""
    if not matcher.is_error():
        return ""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    reason = lines[0] if lines else "cannot be matched"
    if reason.startswith("NoExtension"):
        return "allows no token of the vocabulary here"
    if reason.endswith("parse error:"):  # the lines that follow quote the expression and mark the place
        reason = " ".join([reason, *(line for line in lines if line.startswith("error: "))][-2:])
    return reason[:MAX_REASON]
