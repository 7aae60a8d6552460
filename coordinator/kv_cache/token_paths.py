"""Segments of tokens, and paths of segments. Contexts, forks and sequences together form a tree."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from longleaf.document_text import DocumentText
from longleaf.positions import OWN_ROPE, Rope, WindowSpec
from longleaf.storage.segment_record import SegmentRecord
from longleaf.tenants import DEFAULT_TENANT

ID_BYTES = 4
"""Stored size of a token id."""


@dataclass(frozen=True, slots=True)
class TokenPath:
    """Segments that continue one another from position 0.

    Each segment is used up to the start of the next one, the last one up to position `end`. A path may branch off at
    any position.
    """

    segments: tuple["Segment", ...] = ()
    end: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """The segment ids, as sent to the ranks."""
        return tuple(segment.id for segment in self.segments)

    def parts(self) -> Iterator[tuple["Segment", int, int]]:
        """The segments, and the positions [start, end) for which each is used."""
        ends = [*(segment.start for segment in self.segments[1:]), self.end]
        for segment, end in zip(self.segments, ends, strict=False):  # not strict: an empty path has an end
            yield segment, segment.start, end

    def cut(self, end: int) -> "TokenPath":
        """The prefix of the path up to position `end`."""
        assert end <= self.end
        return TokenPath(tuple(segment for segment in self.segments if segment.start < end), end)

    def seen(self, end: int, windows: WindowSpec | None) -> Iterator["Segment"]:
        """The segments with keys in the windows of a token at position `end` of the path, last segment first."""
        if windows is None:
            return
        first, part_end = windows.first(end), end
        for segment in reversed(self.segments):
            if first >= part_end:
                return
            if segment.start < end:
                yield segment
                part_end = segment.start

    def token_ids(self, start: int = 0, stop: int | None = None) -> "array[int]":
        """The token ids from position `start` up to `stop`, by default the end."""
        found = array("I")
        for segment, part_start, end in self.parts():
            part_end = end if stop is None else max(part_start, min(end, stop))
            found += segment.token_ids[max(0, start - part_start) : part_end - part_start]
        return found

    def num_common(self, token_ids: "array[int]", position: int = 0) -> int:
        """Number of tokens from `position` on, the start of a segment, that the path and `token_ids` have in common."""
        for segment, start, end in self.parts():
            if start >= position:
                count = _num_common(segment.token_ids[: end - start], token_ids[start - position : end - position])
                if count < end - start:
                    return start + count - position
        return self.end - position

    def audit(self) -> None:
        """Asserts that no part is empty, and that each continues the path before it."""
        assert self.segments or self.end == 0
        for i, (segment, start, end) in enumerate(self.parts()):
            assert start < end <= segment.end
            assert segment.before == TokenPath(self.segments[:i], start)


EMPTY_PATH = TokenPath()
"""The empty path, where contexts and prompts begin."""


def _num_common(a: "array[int]", b: "array[int]") -> int:
    """Length of the common prefix of two arrays."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low


class Segment:
    """Tokens that continue the path `before`. It grows until it is sealed.

    A segment outlives an epoch. The placement of its keys and the references to it belong to an epoch.
    """

    def __init__(self, segment_id: int, before: TokenPath, rope: Rope = OWN_ROPE, tenant: str = DEFAULT_TENANT) -> None:
        self.id = segment_id
        self.before = before
        self.rope = rope
        """The rotation of the keys, the same on the whole path."""
        self.tenant = tenant
        """The tenant that may find its tokens. The tenant of the first segment of a path decides for the whole path."""
        self.is_adopted = False
        """Whether its keys may have been imported. Imported keys are not verified to match the tokens."""
        self.token_ids = array("I")
        self.text: DocumentText | None = None
        """The text of its tokens, for a document that arrived as text."""
        self.is_sealed = False

    @classmethod
    def of(cls, record: SegmentRecord, before: TokenPath, tenant: str) -> Self:
        """A stored segment of a tenant. It continues `before`, cut at its start."""
        segment = cls(record.id, before.cut(record.start), record.rope, tenant)
        segment.extend(record.token_ids)
        segment.text = record.text
        return segment

    @property
    def record(self) -> SegmentRecord:
        """The record that is stored of it. It shares the array of token ids."""
        parent = self.before.segments[-1].id if self.before.segments else None
        return SegmentRecord(
            id=self.id, parent=parent, start=self.start, rope=self.rope, token_ids=self.token_ids, text=self.text
        )

    @property
    def start(self) -> int:
        return self.before.end

    @property
    def end(self) -> int:
        return self.before.end + len(self.token_ids)

    @property
    def path(self) -> TokenPath:
        """The path to the segment's end."""
        return TokenPath((*self.before.segments, self), self.end)

    @cached_property
    def stored_bytes(self) -> int:
        """Stored bytes of a sealed segment without its keys and values: token ids and text."""
        assert self.is_sealed
        return ID_BYTES * len(self.token_ids) + (self.text.num_buffered_bytes if self.text is not None else 0)

    def extend(self, token_ids: Sequence[int]) -> None:
        assert not self.is_sealed
        self.token_ids.extend(token_ids)

    def cut(self, end: int) -> None:
        """Removes the tokens from position `end` on."""
        assert not self.is_sealed
        del self.token_ids[end - self.start :]

    def fill(self, position: int, token_id: int) -> None:
        """Sets the id of a token that was placed before its id was known."""
        self.token_ids[position - self.start] = token_id

    def audit(self) -> None:
        """Asserts that all segments before it have the same rope."""
        assert all(segment.rope == self.rope for segment in self.before.segments)
