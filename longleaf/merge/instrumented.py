"""A merge that counts its input bytes."""

from longleaf.attention import Partial
from longleaf.merge.base import Merge, PartialCodec


class CountedMerge:
    """Delegates to another Merge, and counts the bytes of the packed partials passed by this rank, not the bytes
    transferred."""

    def __init__(self, merge: Merge, wire: PartialCodec) -> None:
        self._merge, self._wire = merge, wire
        self._num_bytes = 0

    def to_all(self, partial: Partial) -> Partial:
        self._count(partial)
        return self._merge.to_all(partial)

    def to_owner(self, partial: Partial) -> Partial:
        self._count(partial)
        return self._merge.to_owner(partial)

    def pop_num_bytes(self) -> int:
        """The bytes since the last call."""
        taken, self._num_bytes = self._num_bytes, 0
        return taken

    def _count(self, partial: Partial) -> None:
        num_rows, num_heads, dim = partial.out_THD.shape
        self._num_bytes += num_rows * self._wire.row_bytes(num_heads, dim)
