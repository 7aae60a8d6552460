"""Text to ids while the text arrives: whatever its length, one window of it is held.

A cut is a place where the ids of the whole text are those before the cut and those after it. It is looked for near the
end of a window and proven on the window itself: encoded from a little before the cut (the lead), the rest of the window
must give the same ids from the cut on, and the cut must stand whatever text comes after the window. The lead takes the
place of the text before, so that what a tokenizer adds or strips at the start of a text falls into it, and is dropped.
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
"""A window without a cut that took longer is not made longer: with some tokenizers' patterns the time grows with the
square of a run of digits."""
MAX_TOKENS_BACK = 512
"""Tokens among which a cut is looked for."""
MAX_TRIES = 16
LEAD_TOKENS = 8
MAX_LEAD_TOKENS = 40
"""Tokens of the lead: it starts at a word if there is one between these two."""
MAX_SHIFT = 64
"""Characters by which a lead may be made longer."""
PROBES = ("\n", "a", "0", " a", ".", "\u0334")
"""What may come after a window: each kind of character moves other boundaries (the last one is ordered before other
combining marks)."""


class WindowSizes(NamedTuple):
    """How much of a text is encoded at once, in characters."""

    usual: int = 1 << 16
    """The library takes some 160 bytes per character at its peak."""
    longest: int = 1 << 20
    """Within so many a cut must be found."""
    margin: int = 1024
    """After the place where a cut is wanted."""


USUAL_WINDOW = WindowSizes()


class _Cut(msgspec.Struct, frozen=True):
    """The tokens of a window before `index` are settled; the next window starts with `num_lead` of them."""

    index: int
    start: int
    """Character of the window where the lead starts."""
    num_lead: int


class StablePrefix(NamedTuple):
    """How far a text is settled, beside its ids: what it takes to go on with it."""

    num_bytes: int
    """Of the text in UTF-8, before the next window."""
    num_lead: int
    """First tokens of that window that are settled already."""


NOTHING_SETTLED = StablePrefix(0, 0)


class Encoder:
    """The ids of one text that is given in pieces, equal to those of the text as a whole. Not thread-safe.

    BPE may be cut inside a word, where its merges do not reach across: they are local. Other models weigh a word as a
    whole, and are cut between words only.
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
        """`before` are ids before those of the text. `lead` is a short text before it, which is encoded together with
        it; its first `num_lead` tokens are left out. `clock` counts seconds. `starts`, if given, notes where tokens
        begin."""
        self._tokenizer = tokenizer
        self._clock = clock
        self._is_local = type(tokenizer.model).__name__ == "BPE"
        self._sizes = sizes
        self.starts = starts
        self._wanted = sizes.usual
        self._text = lead
        self._lead_size = len(lead)
        """Characters of it that are in `_text`."""
        self._start = -len(lead)
        """Characters of the whole text before `_text`."""
        self._num_lead = num_lead
        """First tokens of `_text` that are settled already."""
        self._num_bytes = -len(lead.encode())
        """Bytes of the whole text before `_text`."""
        self.token_ids = array("I", before)
        """What is settled; the caller may take it out."""
        self.spans: list[tuple[int, int]] | None = None
        """Where they lie in the text, in characters; only kept when it is set to a list."""

    @property
    def settled(self) -> StablePrefix:
        """How far what is in `token_ids` reaches, while the text is not complete."""
        return NOTHING_SETTLED if self._num_bytes < 0 else StablePrefix(self._num_bytes, self._num_lead)

    def go_on(self, token_ids: "array[int]", settled: StablePrefix) -> None:
        """Goes on where another encoder of the same text had come, whose ids these are: what is pushed next are the
        bytes from `settled.num_bytes` on."""
        self.token_ids = token_ids
        if settled != NOTHING_SETTLED:
            self._text, self._lead_size = "", 0
            self._num_bytes, self._num_lead = settled

    @property
    def num_held(self) -> int:
        """Characters held of the text."""
        return len(self._text) - self._lead_size

    def push(self, text: str) -> None:
        """Takes the next piece. Raises InvalidArgument when no place is found where the text can be cut."""
        for start in range(0, len(text), self._sizes.usual):
            self._text += text[start : start + self._sizes.usual]
            while len(self._text) >= self._wanted:
                self._encode_window()

    def finish(self) -> None:
        """Settles all that was pushed: the text is complete. Idempotent."""
        if self._text:
            encoding = self._encode(self._text)
            self._settle(encoding, self._text, len(encoding))
        self._text, self._lead_size = "", 0

    def _encode(self, text: str) -> Encoding:
        # The library lets other threads run in a batch only.
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def _encode_window(self) -> None:
        window, began = self._text[: self._wanted], self._clock()
        encoding = self._encode(window)
        seconds = self._clock() - began
        cut = self._find_cut(window, encoding)
        if cut is None:
            if self._wanted >= self._sizes.longest or seconds > LONGEST_SECONDS:
                message = f"{self._wanted:,} characters in a row between which the tokenizer cannot be cut"
                raise InvalidArgument("text", f"has {message}")
            self._wanted = min(2 * self._wanted, self._sizes.longest)
            return
        self._settle(encoding, window, cut.index)
        self._num_bytes += len(self._text[: cut.start].encode())
        self._text, self._lead_size = self._text[cut.start :], 0
        self._start += cut.start
        self._num_lead = cut.num_lead
        self._wanted = self._sizes.usual

    def _settle(self, encoding: Encoding, window: str, end: int) -> None:
        if self.starts is not None:
            self.starts.note(encoding, window, self._num_bytes, range(self._num_lead, end), len(self.token_ids))
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
        """Tokens where the window may be cut, and the character where the lead starts."""
        ranked = sorted(self._candidates(window, encoding), key=lambda found: found[0])
        indices = [index for _, index in ranked[:MAX_TRIES]]
        for index in indices:
            yield index, _span(encoding, self._lead(encoding, index))[0]
        if indices:
            # In a run of one character, what the tokenizer puts before a text shifts how the run is cut: some lead
            # makes up for it.
            end = _span(encoding, indices[0])[0] - LEAD_TOKENS
            for start in range(end, max(0, end - MAX_SHIFT), -1):
                yield indices[0], start

    def _candidates(self, window: str, encoding: Encoding) -> Iterator[tuple[int, int]]:
        """Tokens where the window may be cut, each after its rank: between words, before a space, elsewhere."""
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
        # Beyond the cut as well: what comes after may move boundaries that show in the ids only later.
        count = (num_lead + len(whole)) // 2 + 1
        is_firm = all(_tokens(self._encode(rest + probe), count) == _tokens(whole, count) for probe in PROBES)
        return _Cut(index, start, num_lead) if is_firm else None

    def _lead(self, encoding: Encoding, index: int) -> int:
        """Token where the lead of a cut before `index` starts."""
        latest, earliest = max(0, index - LEAD_TOKENS), max(0, index - MAX_LEAD_TOKENS)
        for lead in range(latest, earliest, -1):
            if encoding.token_to_word(lead) != encoding.token_to_word(lead - 1):
                return lead
        return latest


class _Tail:
    """The ids of a window and how they form words, to be compared from one token on."""

    def __init__(self, encoding: Encoding) -> None:
        self._ids, self._words = encoding.ids, encoding.word_ids

    def num_from(self, index: int) -> int:
        return len(self._ids) - index

    def equals(self, index: int, other: Encoding, other_index: int) -> bool:
        """Whether both are the same from there on. Words as well: groups of digits may not show in the ids."""
        is_same = self._ids[index:] == other.ids[other_index:]
        return is_same and _lengths(self._words[index:]) == _lengths(other.word_ids[other_index:])


def _lengths(words: list[int | None]) -> list[int]:
    """Tokens of each word."""
    return [len(list(tokens)) for _, tokens in groupby(words)]


def _span(encoding: Encoding, index: int) -> tuple[int, int]:
    return cast(tuple[int, int], encoding.token_to_chars(index))


def _tokens(encoding: Encoding, count: int) -> list[tuple[int, tuple[int, int], int | None]]:
    """The first tokens, where they lie, and to which word they belong."""
    return list(zip(encoding.ids[:count], encoding.offsets[:count], encoding.word_ids[:count], strict=True))


def _first_token_from(encoding: Encoding, character: int) -> int:
    """The first token that starts at `character` or later; the last one if there is none."""
    found = bisect_left(range(len(encoding)), character, key=lambda index: _span(encoding, index)[0])
    return min(found, len(encoding) - 1)
