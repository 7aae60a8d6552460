"""Where tokens begin in a text, noted while the text is encoded: the byte of each STRIDE-th one."""

from array import array
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import cast

from tokenizers import Encoding

from longleaf.document_text import STRIDE, count_starts
from longleaf.token_bytes import Spell


class TokenOffsets:
    """Takes note of each window's settled tokens.

    Where tokens, spelled one after the other, are the bytes of the window, they begin where they are in that row, also
    inside of a character. A space that is put before a text counts for nothing. Elsewhere (text that was normalised, or
    tokens without bytes of their own) the tokenizer's own offsets count, which are at characters.
    """

    def __init__(self, num_lead: int, spell: Spell | None, first: str = "", tail: str = "") -> None:
        """`num_lead` tokens are before the text, and then those of `tail`, which are encoded together with it. `first`
        is a token that the first window may begin with, and that no text has."""
        self._num_lead = num_lead
        self._tail_bytes = len(tail.encode())
        self._first = first
        self._spell = spell
        self.starts = array("Q", bytes(8 * count_starts(num_lead)))
        """Of type `Q`."""
        self._is_lost = False

    def num_lead(self, token_ids: Sequence[int]) -> int:
        """Number of tokens of a document before the first one with bytes of its text."""
        if self._spell is None:
            return self._num_lead
        num_bytes, position = 0, self._num_lead
        for token_id in islice(token_ids, self._num_lead, None):
            num_bytes += len(self._spell(token_id, False))
            if num_bytes > self._tail_bytes:
                break
            position += 1
        return position

    def resume(self, starts: "array[int]", num_tokens: int) -> None:
        """The first `num_tokens` tokens were noted elsewhere. Where they were not, as early versions did not, nothing
        is noted any more."""
        self.starts, self._is_lost = starts, len(starts) != count_starts(num_tokens)
        if self._is_lost:
            self.starts = array("Q")

    def is_whole(self, num_tokens: int) -> bool:
        """Whether so many tokens have all of theirs."""
        return not self._is_lost and len(self.starts) == count_starts(num_tokens)

    def record(self, encoding: Encoding, window: str, num_bytes: int, stable: range, position: int) -> None:
        """Tokens `stable` of the encoding of a window, which `num_bytes` bytes come before; the first of them is the
        token at `position` of the document."""
        first = stable.start + -position % STRIDE
        wanted = range(first, stable.stop, STRIDE)
        if not wanted or self._is_lost:
            return
        ids, skipped = encoding.ids, len(self._first.encode())
        if self._first and window.startswith(self._first):
            shifted = range(wanted.start - 1, wanted.stop - 1, STRIDE)
            starts = self._starts_by_bytes(ids[1:], window.encode()[skipped:], shifted)
            starts = None if starts is None else [skipped + start for start in starts]
        else:
            starts = self._starts_by_bytes(ids, window.encode(), wanted)
        found = starts if starts is not None else _offsets(encoding, window, wanted)
        for start in found:
            self.starts.append(max(num_bytes + start, self.starts[-1] if self.starts else 0, 0))

    def _starts_by_bytes(self, ids: Sequence[int], window: bytes, wanted: range) -> list[int] | None:
        """None where tokens are not spelled as the window is."""
        if self._spell is None:
            return None
        known = {token_id: self._spell(token_id, False) for token_id in set(ids)}
        parts = [known[token_id] for token_id in ids]
        text_bytes = b"".join(parts)
        has_space = len(text_bytes) == len(window) + 1 and text_bytes.startswith(b" ")
        if text_bytes[has_space:] != window:
            return None
        ends = list(accumulate(map(len, parts), initial=0))
        return [max(0, ends[index] - has_space) for index in wanted]


def _offsets(encoding: Encoding, window: str, wanted: range) -> list[int]:
    """By the tokenizer."""
    found, character, num_bytes = list[int](), 0, 0
    for index in wanted:
        start = max(character, cast(tuple[int, int], encoding.token_to_chars(index))[0])
        num_bytes += len(window[character:start].encode())
        character = start
        found.append(num_bytes)
    return found
