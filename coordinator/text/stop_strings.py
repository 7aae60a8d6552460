"""Finds stop strings in a text that arrives in pieces, in time that does not depend on their lengths.

Each string is matched with the algorithm of Knuth, Morris and Pratt (1977): the amortized cost per character is
constant.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

NUM_TABLES = 1024
"""Number of stop strings whose tables are cached."""


class StopMatch(NamedTuple):
    """A stop string in a text. Of several, the smallest is complete first."""

    end: int
    """Characters of the text up to the end of the string."""
    start: int
    stop: str


class StopStrings:
    """The stop strings of one text."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` must not contain empty strings."""
        self._searches = [_Search(stop) for stop in stops]
        self._size = 0
        """Characters of the text so far."""

    def push(self, text: str) -> StopMatch | None:
        """Adds the next piece of the text. Returns the first match, after which no piece may be added."""
        matches = list[StopMatch]()
        for search in self._searches:
            end = search.push(text)
            if end is not None:
                end += self._size
                matches.append(StopMatch(end, end - len(search.stop), search.stop))
        self._size += len(text)
        return min(matches, default=None)

    @property
    def num_pending(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return max((search.num_matched for search in self._searches), default=0)


class _Search:
    """The state of the search for one string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest suffix of the text that is a prefix of the string."""

    def push(self, text: str) -> int | None:
        """Characters of `text` up to the end of the first match."""
        stop, num_matched = self.stop, self.num_matched
        if not num_matched and stop[0] not in text:
            return None
        borders = _borders(stop)
        for number, character in enumerate(text, 1):
            while num_matched and character != stop[num_matched]:
                num_matched = borders[num_matched - 1]
            if character == stop[num_matched]:
                num_matched += 1
                if num_matched == len(stop):
                    return number
        self.num_matched = num_matched
        return None


@lru_cache(maxsize=NUM_TABLES)
def _borders(stop: str) -> list[int]:
    """For each prefix of the string: the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(stop)
    size = 0
    for i in range(1, len(stop)):
        while size and stop[i] != stop[size]:
            size = borders[size - 1]
        size += stop[i] == stop[size]
        borders[i] = size
    return borders
