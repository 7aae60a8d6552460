"""Sections of a document: its pages, slides, chapters or cells."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from longleaf.documents.limits import ExtractionLimits


class Section(NamedTuple):
    """Text of one place in a document."""

    label: str
    """The place, such as "page 7"; empty if the document has no places."""
    text: str


class Reader(Protocol):
    """Reads one format. Raises Unreadable and LimitExceeded; any other exception means a damaged file."""

    def __call__(self, data: bytes, limits: ExtractionLimits) -> Iterator[Section]: ...


def ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers as text: 1, 3-5, 9."""
    found = list[list[int]]()
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)
