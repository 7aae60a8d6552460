"""The prefix cache: finds the held segments that a prompt begins with. Pure."""

from array import array
from collections.abc import Iterable, Iterator

from coordinator.kv_cache.segment_placement import SegmentPlacements
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.positions import OWN_ROPE, Rope
from longleaf.tenants import DEFAULT_TENANT

BLOCKS_AT_ONCE = 512
"""Maximum number of blocks whose ids are copied at once. A segment may be much longer."""
ALL = "*"
"""The owner of entries that all tenants may find. No tenant has this name."""


class PrefixIndex:
    """An index of sealed segments by the tokens of the path up to each block.

    Each block of token ids, counted from position 0, has a link: the hash of its ids and of the previous link. The
    first link hashes the rope and the tenant. The link at the end of a block thus identifies all tokens up to that
    position, with their rotation and tenant. Links only select candidates, which are then compared id by id. A prefix
    shorter than a block is not found. With `is_shared`, tenants find segments of other tenants, but none on an adopted
    path, because its keys may not match its tokens.
    """

    def __init__(
        self,
        block_size: int,
        holdings: SegmentPlacements,
        blocks_at_once: int = BLOCKS_AT_ONCE,
        *,
        is_shared: bool = False,
    ) -> None:
        self._block_size = block_size
        self._is_shared = is_shared
        self._holdings = holdings
        self._blocks_at_once = blocks_at_once
        self._links: dict[int, list[int]] = {}
        """By segment id, the links at the ends of the blocks that end in it."""
        self._segments: dict[int, list[Segment]] = {}
        """Segments by link."""

    def add(self, segment: Segment) -> None:
        """Adds a sealed segment. The segments before it must have been added."""
        first, size = segment.start // self._block_size, self._block_size
        links, link, stride = list[int](), self._link(segment, first), self._blocks_at_once * size
        for start in range(first * size, segment.end - size + 1, stride):
            links += self._chain(link, segment.path.token_ids(start, start + stride))
            link = links[-1]
        self._links[segment.id] = links
        for link in links:
            self._segments.setdefault(link, []).append(segment)

    def remove(self, segment: Segment) -> None:
        """Removes a segment, if it is indexed."""
        for link in self._links.pop(segment.id, []):
            self._segments[link].remove(segment)
            if not self._segments[link]:
                del self._segments[link]

    def match(self, token_ids: "array[int]", rope: Rope = OWN_ROPE, tenant: str = DEFAULT_TENANT) -> TokenPath:
        """The longest indexed path that is a prefix of `token_ids` with `rope`, that the tenant may find, and that can
        be continued; empty if there is none."""
        owners = (ALL, tenant) if self._is_shared else (tenant,)
        return max((self._match(token_ids, rope, owner) for owner in owners), key=lambda path: path.end)

    def _match(self, token_ids: "array[int]", rope: Rope, owner: str) -> TokenPath:
        found: list[list[Segment]] = []
        for link in self._chain(hash((rope, owner)), token_ids):
            if link not in self._segments:
                break
            found.append(self._segments[link])
        best, size, tried = TokenPath(), self._block_size, set[int]()
        while found and best.end < (len(found) + 1) * size:  # fewer common blocks cannot give a longer prefix
            for segment in found.pop():
                if segment.id not in tried and segment.rope == rope and self._owner(segment) == owner:
                    tried.add(segment.id)
                    best = max(best, self._beginning(segment.path, token_ids), key=lambda path: path.end)
        return best if best.end >= size else TokenPath()

    def _beginning(self, path: TokenPath, token_ids: "array[int]") -> TokenPath:
        """The common prefix of `token_ids` and a path, up to a position at which the path can be continued."""
        end, _ = self._holdings.seams(path, min(path.num_common(token_ids), self._holdings.whole_end(path)))
        return path.cut(end)

    def _root(self, segment: Segment) -> int:
        """The link before the first block of the path to a segment."""
        return hash((segment.rope, self._owner(segment)))

    def _owner(self, segment: Segment) -> str:
        """The owner of a segment: that of the first segment of its path."""
        first = segment.before.segments[0] if segment.before.segments else segment
        return ALL if self._is_shared and not first.is_adopted else first.tenant

    def _link(self, continued: Segment, num_blocks: int) -> int:
        """The link after `num_blocks` blocks of the path before a segment. All its segments must be indexed."""
        if num_blocks == 0:
            return self._root(continued)
        segment = [s for s in continued.before.segments if s.start < num_blocks * self._block_size][-1]
        return self._links[segment.id][num_blocks - segment.start // self._block_size - 1]

    def _chain(self, link: int, token_ids: "array[int]") -> Iterator[int]:
        """The links after `link`, one for each whole block of `token_ids`."""
        size = self._block_size
        for start in range(0, len(token_ids) - size + 1, size):
            link = hash((link, token_ids[start : start + size].tobytes()))
            yield link

    def audit(self, segments: Iterable[Segment]) -> None:
        """Asserts that only existing segments are indexed, each under the links of its tokens."""
        alive = {segment.id: segment for segment in segments}
        for segment_id, links in self._links.items():
            segment = alive[segment_id]
            assert segment.is_sealed
            whole = list(self._chain(self._root(segment), segment.path.token_ids()))
            assert links == whole[segment.start // self._block_size :]
            assert all(segment in self._segments[link] for link in links)
        assert sum(map(len, self._segments.values())) == sum(map(len, self._links.values()))
