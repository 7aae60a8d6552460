"""Looks for stop strings in a text that arrives in pieces, in time that does not depend on their lengths.

Each string is matched with the algorithm of Knuth, Morris and Pratt (1977): the mean cost of a character is constant,
however long the string is and however much of it has been seen.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

NUM_TABLES = 1024
"""Stop strings whose tables are kept."""


class StopMatch(NamedTuple):
    """A stop string in a text. Of several, the smallest is complete first."""

    end: int
    """Characters of the text up to the end of the string."""
    start: int
    stop: str


class StopStrings:
    """The stop strings of one text."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings."""
        self._searches = [_Search(stop) for stop in stops]
        self._size = 0
        """Characters of the text so far."""

    def push(self, text: str) -> StopMatch | None:
        """Takes the next piece of the text. Gives the first match, after which no piece may be pushed."""
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
        """Characters at the end of the text that may be the start of a stop string."""
        return max((search.num_matched for search in self._searches), default=0)


class _Search:
    """The search for one string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest end of the text that is a start of the string."""

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
    """For each start of the string: the length of its longest end, other than itself, that is also its start."""
    borders = [0] * len(stop)
    size = 0
    for i in range(1, len(stop)):
        while size and stop[i] != stop[size]:
            size = borders[size - 1]
        size += stop[i] == stop[size]
        borders[i] = size
    return borders
