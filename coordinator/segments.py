"""The segments that anybody refers to."""

from collections.abc import Iterable, Iterator

from coordinator.blocks import Placer
from coordinator.paths import Path, Segment


class Segments:
    """All segments that anybody refers to. The last reference that goes frees the blocks.

    Who refers to a segment refers to the whole path before it as well.
    """

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._by_id: dict[int, Segment] = {}
        self._next_id = 0
        self._forgotten: list[int] = []

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_id.values())

    def create(self, before: Path) -> Segment:
        """A new, growing segment with one reference: the caller's."""
        segment = Segment(self._next_id, before)
        self._by_id[segment.id] = segment
        self._next_id += 1
        return segment

    def retain(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            segment.num_references += 1

    def release(self, segments: Iterable[Segment]) -> None:
        """Drops one reference of each; what nobody refers to is freed and will be forgotten by the ranks."""
        for segment in segments:
            segment.num_references -= 1
            if segment.num_references == 0:
                del self._by_id[segment.id]
                self._placer.free(segment.runs)
                # A segment without runs was never in a plan, so no rank knows it.
                self._forgotten += [segment.id] if segment.runs else []

    def take_forgotten(self) -> tuple[int, ...]:
        """Ids for the next plan's release_segments; each is given once."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten

    def check(self) -> None:
        for segment in self._by_id.values():
            segment.check()
