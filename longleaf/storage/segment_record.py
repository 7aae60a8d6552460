"""Records of segments, as the catalog stores them and archives contain them."""

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from longleaf.document_text import DocumentText
from longleaf.positions import OWN_ROPE, Rope


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed segment. It continues the path of `parent`, cut at `start`."""

    id: int
    """Assigned by the caller; never reused within a catalog."""
    parent: int | None = None
    """The last segment of the path that it continues; None at position 0."""
    start: int = 0
    """The position of its first token."""
    rope: Rope = OWN_ROPE
    token_ids: "array[int]"
    """Type code `I`."""
    text: DocumentText | None = None
    """The source text of the tokens, where known."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def with_ends(path: Sequence[SegmentRecord], num_tokens: int) -> Iterator[tuple[SegmentRecord, int]]:
    """The segments of a path of so many tokens, and the positions up to which each is used."""
    return zip(path, [*(segment.start for segment in path[1:]), num_tokens], strict=True)
