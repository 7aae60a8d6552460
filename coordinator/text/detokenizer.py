"""Streaming detokenization: only whole characters are emitted, and no part of a stop string.

The texts of the pieces, joined, equal the decoding of all ids; each piece has exactly the text of its ids. Ids are
released in order, so a piece is the number of its ids and their text.
"""

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from coordinator.text.stop_strings import StopStrings
from longleaf.token_bytes import Spell

REPLACEMENT = "\ufffd"
MAX_OPEN_TOKENS = 16
"""Undecided tokens after which the longest stable prefix is emitted; a UTF-8 character spans at most four."""
NUM_BEFORE = 8
"""Tokens of the prompt that serve as context for the decoding of its continuation."""
MAX_SILENT_TOKENS = 256
"""Limit of undecided tokens whose last token has no text on its own."""


class Alphabet(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a tokenizer that detokenization needs."""

    decode: Callable[[Sequence[int]], str]
    """Decodes ids to text, without special tokens."""
    silent: frozenset[int] = frozenset()
    """Ids without text: special tokens, and rows of the embedding without a token."""
    bytes: frozenset[int] = frozenset()
    """Byte-fallback ids: a run of them is decoded as a whole, so the text is open until the run ends."""
    spell: Spell | None = None
    """Returns the bytes of single ids; None where the tokenizer has no such bytes."""


class Detokenizer:
    """Decodes a sliding window: emitted ids as context, followed by the ids whose text is open.

    Decoders depend on neighbours (a leading space is stripped, bytes join into characters), so an id is never decoded
    without context: its text is the text that it adds to that of the ids before it.
    """

    def __init__(self, alphabet: Alphabet, before: Sequence[int] = ()) -> None:
        """`before` are the ids that the answer continues, as returned by `ids_before`."""
        self._alphabet = alphabet
        self._shown: tuple[int, ...] = tuple(before)
        """The ids of the last emitted text; they begin and end at character boundaries."""
        self._open: list[int] = []

    def push(self, token_id: int) -> tuple[int, str]:
        """Return the number of ids that `token_id` completes, and their text; 0 and empty while the text is open."""
        self._open.append(token_id)
        is_silent = token_id in self._alphabet.silent
        if is_silent or token_id in self._alphabet.bytes:
            if len(self._open) < MAX_SILENT_TOKENS:
                return 0, ""
            text = self._text(len(self._open))
            return self._take(len(self._open), text) if is_silent else self._commit(text)
        text = self._text(len(self._open))
        if text and not text.endswith(REPLACEMENT):
            return self._take(len(self._open), text)
        return self._commit(text) if len(self._open) > MAX_OPEN_TOKENS else (0, "")

    def finish(self) -> tuple[int, str]:
        """Return the number of open ids and their text, even if it is incomplete."""
        return self._take(len(self._open), self._text(len(self._open)))

    def _text(self, num_open: int) -> str:
        decode = self._alphabet.decode
        return decode([*self._shown, *self._open[:num_open]])[len(decode(self._shown)) :]

    def _take(self, num_open: int, text: str) -> tuple[int, str]:
        if text:
            self._shown = tuple(self._open[:num_open])
        del self._open[:num_open]
        return num_open, text

    def _commit(self, text: str) -> tuple[int, str]:
        """Emit the longest prefix that no later id can change, so that a run of invalid bytes does not accumulate.

        A cut lies between characters if and only if the parts decode to the whole: a divided character would appear as
        two or more replacement characters.
        """
        last = len(self._open) - 4
        for cut in range(last, max(0, last - MAX_OPEN_TOKENS), -1):
            start, rest = self._text(cut), self._alphabet.decode(self._open[cut:])
            if start and rest and start + rest == text:
                return self._take(cut, start)
        return 0, ""


def ids_before(alphabet: Alphabet, prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the last ids of a prompt whose text ends with a whole character. Decoded after them, a continuation keeps
    its first space. Empty if there are none.
    """
    ids = tuple(token_id for token_id in prompt[-NUM_BEFORE:] if token_id not in alphabet.silent)
    text = alphabet.decode(ids)
    return ids if text and not text.endswith(REPLACEMENT) else ()


class TextStream:
    """Detokenises one answer and watches for its stop strings."""

    def __init__(self, alphabet: Alphabet, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(alphabet, before)
        self._stops = StopStrings(stops) if stops else None
        self._buffered: deque[tuple[int, str]] = deque()
        """Numbers of completed ids, and their texts, which may belong to a stop string."""
        self._num_shown, self._num_buffered = 0, 0
        """Characters of emitted pieces, and of `_buffered`."""
        self.matched_stop = ""
        """The stop string that was found: the answer ends, and later ids must not be pushed."""

    def push(self, token_id: int) -> tuple[int, str]:
        """Return the number of ids that `token_id` releases, and their text. At a stop string: all ids so far, and the
        text before the string."""
        num_ids, text = self._detokenizer.push(token_id)
        if not num_ids or self._stops is None:
            return num_ids, text
        return self._search(self._stops, num_ids, text)

    def finish(self, num_silent: int = 0) -> tuple[int, str]:
        """Return everything that is held back. `num_silent` ids without text (the end token) follow it."""
        num_ids, text = self._detokenizer.finish()
        if self._stops is not None:
            num_ids, text = self._search(self._stops, num_ids, text, is_last=True)
        return num_ids + (0 if self.matched_stop else num_silent), text

    def _search(self, stops: StopStrings, num_ids: int, text: str, *, is_last: bool = False) -> tuple[int, str]:
        """Return the pieces that cannot belong to a stop string, after the addition of the next piece."""
        self._buffered.append((num_ids, text))
        self._num_buffered += len(text)
        if (match := stops.push(text)) is not None:
            # The string that is completed first wins, as if the text arrived one character at a time.
            self.matched_stop = match.stop
            start = match.start - self._num_shown
            num_ids, text = self._release(self._num_buffered)
            return num_ids, text[:start]
        return self._release(self._num_buffered - (0 if is_last else stops.num_pending))

    def _release(self, num_characters: int) -> tuple[int, str]:
        """Return the pieces that end within the first `num_characters` of the held text."""
        num_ids, texts = 0, list[str]()
        while self._buffered and len(self._buffered[0][1]) <= num_characters:
            count, text = self._buffered.popleft()
            num_ids += count
            texts.append(text)
            num_characters -= len(text)
            self._num_buffered -= len(text)
            self._num_shown += len(text)
        return num_ids, "".join(texts)
