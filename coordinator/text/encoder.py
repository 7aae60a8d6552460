"""Streaming tokenization: only one window of a text is in memory, however long the text is.

A cut is a position at which the ids of the whole text are the ids of the part before it followed by those of the part
after it. The encoder looks for a cut near the end of a window and verifies it within the window: encoded from a few
tokens before the cut (the lead), the rest of the window must give the same ids from the cut on, and the cut must be
valid for any text that follows. The lead replaces the preceding text: anything that a tokenizer adds or strips at the
start of a text affects only the ids of the lead, which are dropped.
"""

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, cast

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from coordinator.text.token_offsets import TokenOffsets
from longleaf.errors import InvalidArgument

LONGEST_SECONDS = 1.0
"""A window without a cut is not enlarged if its encoding took longer than this. With the patterns of some tokenizers,
the time is quadratic in the length of a run of digits.
"""
MAX_TOKENS_BACK = 512
"""Number of tokens that are searched for a cut."""
MAX_TRIES = 16
LEAD_TOKENS = 8
MAX_LEAD_TOKENS = 40
"""Minimum and maximum number of tokens of the lead. It starts at a word boundary if there is one in this range."""
MAX_SHIFT = 64
"""Maximum number of characters by which a lead is extended."""
PROBES = ("\n", "a", "0", " a", ".", "\u0334")
"""Possible continuations of a window. Each kind of character moves different boundaries. The last one sorts before
other combining marks.
"""


class WindowSizes(NamedTuple):
    """Window sizes in characters."""

    usual: int = 1 << 16
    """At its peak, the library uses about 160 bytes per character."""
    longest: int = 1 << 20
    """Maximum size within which a cut must be found."""
    margin: int = 1024
    """Characters after the preferred cut."""


USUAL_WINDOW = WindowSizes()


class _Cut(msgspec.Struct, frozen=True):
    """The tokens of a window before `index` are final; the next window starts with `num_lead` of them."""

    index: int
    start: int
    """Character of the window at which the lead starts."""
    num_lead: int


class StablePrefix(NamedTuple):
    """The end of the final part of a text. Together with the ids, this is the state needed to resume."""

    num_bytes: int
    """Bytes of the text in UTF-8 before the next window."""
    num_lead: int
    """Number of first tokens of that window that are already final."""


NOTHING_STABLE = StablePrefix(0, 0)


class Encoder:
    """Encodes one text given in pieces; the ids equal those of the whole text. Not thread-safe.

    With BPE, a cut may be inside a word if no merge crosses it, because merges are local. Other models segment a word
    as a whole, so cuts are between words only.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        before: Sequence[int] = (),
        *,
        lead: str = "",
        num_lead: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        sizes: WindowSizes = USUAL_WINDOW,
        starts: TokenOffsets | None = None,
    ) -> None:
        """`before` are ids that precede those of the text. `lead` is a short text before the text. Both are encoded
        together, and the first `num_lead` tokens are dropped. `clock` counts seconds. `starts`, if given, records the
        start offsets of tokens.
        """
        self._tokenizer = tokenizer
        self._clock = clock
        self._is_local = type(tokenizer.model).__name__ == "BPE"
        self._sizes = sizes
        self.starts = starts
        self._wanted = sizes.usual
        self._text = lead
        self._lead_size = len(lead)
        """Characters of the lead that are in `_text`."""
        self._start = -len(lead)
        """Characters of the whole text before `_text`."""
        self._num_lead = num_lead
        """Number of first tokens of `_text` that are already final."""
        self._num_bytes = -len(lead.encode())
        """Bytes of the whole text before `_text`."""
        self.token_ids = array("I", before)
        """The final ids; the caller may remove them."""
        self.spans: list[tuple[int, int]] | None = None
        """Their spans in the text, in characters; None unless `record_spans` was called."""

    def record_spans(self) -> None:
        """Record the spans of the ids; those of ids that are already there are empty."""
        self.spans = [(0, 0)] * len(self.token_ids)

    @property
    def stable(self) -> StablePrefix:
        """The position up to which `token_ids` is final, while the text is incomplete."""
        return NOTHING_STABLE if self._num_bytes < 0 else StablePrefix(self._num_bytes, self._num_lead)

    def resume(self, token_ids: "array[int]", stable: StablePrefix) -> None:
        """Resume from the ids of another encoder of the same text. The next push starts at byte `stable.num_bytes`."""
        self.token_ids = token_ids
        if stable != NOTHING_STABLE:
            self._text, self._lead_size = "", 0
            self._num_bytes, self._num_lead = stable

    @property
    def num_buffered(self) -> int:
        """Characters of the text that are held."""
        return len(self._text) - self._lead_size

    def push(self, text: str) -> None:
        """Add the next piece. Raises InvalidArgument when no position is found at which the text can be cut."""
        for start in range(0, len(text), self._sizes.usual):
            self._text += text[start : start + self._sizes.usual]
            while len(self._text) >= self._wanted:
                self._encode_window()

    def finish(self) -> None:
        """Finalize all pushed text, because the text is complete. Idempotent."""
        if self._text:
            encoding = self._encode(self._text)
            self._commit(encoding, self._text, len(encoding))
        self._text, self._lead_size = "", 0

    def _encode(self, text: str) -> Encoding:
        # The library releases the GIL only in batch calls.
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def _encode_window(self) -> None:
        window, began = self._text[: self._wanted], self._clock()
        encoding = self._encode(window)
        seconds = self._clock() - began
        cut = self._find_cut(window, encoding)
        if cut is None:
            if self._wanted >= self._sizes.longest or seconds > LONGEST_SECONDS:
                message = f"{self._wanted:,} consecutive characters that the tokenizer cannot split"
                raise InvalidArgument("text", f"has {message}")
            self._wanted = min(2 * self._wanted, self._sizes.longest)
            return
        self._commit(encoding, window, cut.index)
        self._num_bytes += len(self._text[: cut.start].encode())
        self._text, self._lead_size = self._text[cut.start :], 0
        self._start += cut.start
        self._num_lead = cut.num_lead
        self._wanted = self._sizes.usual

    def _commit(self, encoding: Encoding, window: str, end: int) -> None:
        if self.starts is not None:
            self.starts.record(encoding, window, self._num_bytes, range(self._num_lead, end), len(self.token_ids))
        self.token_ids.extend(encoding.ids[self._num_lead : end])
        if self.spans is not None:
            spans = encoding.offsets[self._num_lead : end]
            self.spans += ((self._start + first, self._start + last) for first, last in spans)

    def _find_cut(self, window: str, encoding: Encoding) -> _Cut | None:
        tail = _Tail(encoding)
        for index, start in self._tries(window, encoding):
            if (cut := self._proven(window[start:], start, index, tail)) is not None:
                return cut
        return None

    def _tries(self, window: str, encoding: Encoding) -> Iterator[tuple[int, int]]:
        """Yield candidate cut tokens, each with the character at which its lead starts."""
        ranked = sorted(self._candidates(window, encoding), key=lambda found: found[0])
        indices = [index for _, index in ranked[:MAX_TRIES]]
        for index in indices:
            yield index, _span(encoding, self._lead(encoding, index))[0]
        if indices:
            # In a run of one character, the prefix that the tokenizer adds to a text shifts the segmentation; one of
            # these leads compensates for the shift.
            end = _span(encoding, indices[0])[0] - LEAD_TOKENS
            for start in range(end, max(0, end - MAX_SHIFT), -1):
                yield indices[0], start

    def _candidates(self, window: str, encoding: Encoding) -> Iterator[tuple[int, int]]:
        """Yield candidate cut tokens with their ranks: between words, before a space, elsewhere."""
        last = _first_token_from(encoding, len(window) - self._sizes.margin)
        for index in range(last, max(self._num_lead, last - MAX_TOKENS_BACK), -1):
            if encoding.token_to_word(index) != encoding.token_to_word(index - 1):
                yield 0, index
            elif self._is_local and _span(encoding, index)[0] >= _span(encoding, index - 1)[1]:
                yield (1 if window[_span(encoding, index)[0]].isspace() else 2), index

    def _proven(self, rest: str, start: int, index: int, tail: "_Tail") -> _Cut | None:
        whole = self._encode(rest)
        num_lead = len(whole) - tail.num_from(index)
        if num_lead < 0 or not tail.equals(index, whole, num_lead):
            return None
        # Tokens beyond the cut must agree as well: a moved boundary may change the ids only further on.
        count = (num_lead + len(whole)) // 2 + 1
        is_firm = all(_tokens(self._encode(rest + probe), count) == _tokens(whole, count) for probe in PROBES)
        return _Cut(index, start, num_lead) if is_firm else None

    def _lead(self, encoding: Encoding, index: int) -> int:
        """Return the token at which the lead of a cut before `index` starts."""
        latest, earliest = max(0, index - LEAD_TOKENS), max(0, index - MAX_LEAD_TOKENS)
        for lead in range(latest, earliest, -1):
            if encoding.token_to_word(lead) != encoding.token_to_word(lead - 1):
                return lead
        return latest


class _Tail:
    """The ids of a window and their words, for comparisons from a given token on."""

    def __init__(self, encoding: Encoding) -> None:
        self._ids, self._words = encoding.ids, encoding.word_ids

    def num_from(self, index: int) -> int:
        return len(self._ids) - index

    def equals(self, index: int, other: Encoding, other_index: int) -> bool:
        """Return whether the remaining ids and words of both are equal. Equal ids may group digits into different
        words."""
        is_same = self._ids[index:] == other.ids[other_index:]
        return is_same and _lengths(self._words[index:]) == _lengths(other.word_ids[other_index:])


def _lengths(words: list[int | None]) -> list[int]:
    """Return the number of tokens of each word."""
    return [len(list(tokens)) for _, tokens in groupby(words)]


def _span(encoding: Encoding, index: int) -> tuple[int, int]:
    return cast(tuple[int, int], encoding.token_to_chars(index))


def _tokens(encoding: Encoding, count: int) -> list[tuple[int, tuple[int, int], int | None]]:
    """Return the first tokens with their offsets and words."""
    return list(zip(encoding.ids[:count], encoding.offsets[:count], encoding.word_ids[:count], strict=True))


def _first_token_from(encoding: Encoding, character: int) -> int:
    """Return the first token that starts at `character` or later; the last one if there is none."""
    found = bisect_left(range(len(encoding)), character, key=lambda index: _span(encoding, index)[0])
    return min(found, len(encoding) - 1)
