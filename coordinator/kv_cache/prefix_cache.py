"""The prefix cache: finds the held segments that a prompt begins with, or that continue its context. Pure."""

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice

from coordinator.kv_cache.segment_placement import SegmentPlacements
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.positions import OWN_ROPE, Rope
from longleaf.tenants import DEFAULT_TENANT

BLOCKS_AT_ONCE = 512
"""Maximum number of blocks whose ids are copied at once. A segment may be much longer."""
ALL = "*"
"""The owner of entries that all tenants may find. No tenant has this name."""
TOKENS_PER_LINK = 8
"""Number of tokens that two prompts must have in common after their origin before one reuses the other."""
MAX_LINKS = 1024
"""Maximum number of links of a prompt, from its origin on. It bounds the time to hash a long prompt."""
MAX_CANDIDATES = 64
"""Maximum number of prompts to compare for one link, the most recent first."""


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
        placements: SegmentPlacements,
        blocks_at_once: int = BLOCKS_AT_ONCE,
        *,
        is_shared: bool = False,
    ) -> None:
        self._block_size = block_size
        self._is_shared = is_shared
        self._placements = placements
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
            links += _chain(link, segment.path.token_ids(start, start + stride), size)
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
        for link in _chain(hash((rope, owner)), token_ids, self._block_size):
            if link not in self._segments:
                break
            found.append(self._segments[link])
        best, size, tried = TokenPath(), self._block_size, set[int]()
        while found and best.end < (len(found) + 1) * size:  # fewer common blocks cannot give a longer prefix
            for segment in found.pop():
                if segment.id not in tried and segment.rope == rope and self._owner(segment) == owner:
                    tried.add(segment.id)
                    best = max(best, _common(self._placements, segment.path, token_ids), key=lambda path: path.end)
        return best if best.end >= size else TokenPath()

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

    def audit(self, segments: Iterable[Segment]) -> None:
        """Asserts that only existing segments are indexed, each under the links of its tokens."""
        alive = {segment.id: segment for segment in segments}
        for segment_id, links in self._links.items():
            segment = alive[segment_id]
            assert segment.is_sealed
            whole = list(_chain(self._root(segment), segment.path.token_ids(), self._block_size))
            assert links == whole[segment.start // self._block_size :]
            assert all(segment in self._segments[link] for link in links)
        assert sum(map(len, self._segments.values())) == sum(map(len, self._links.values()))


class ContinuationIndex:
    """An index of cached prompts and answers by the tokens with which they continue an origin: the path of a context,
    or the empty path.

    It finds the turns of a conversation, which are often shorter than a block. Each TOKENS_PER_LINK tokens after the
    origin have a link, as in `PrefixIndex`; fewer tokens are not found. The first link hashes the origin, or the rope
    and the tenant where the origin is empty, so contexts share no entries, and neither do tenants.
    """

    def __init__(self, placements: SegmentPlacements) -> None:
        self._placements = placements
        self._links: dict[int, list[int]] = {}
        """By segment id, the links that end in the segment."""
        self._origins: dict[int, TokenPath] = {}
        """By segment id."""
        self._segments: dict[int, dict[int, Segment]] = {}
        """By link and segment id, the segments, the oldest first."""

    def add(self, segment: Segment, origin: TokenPath) -> bool:
        """Adds a sealed segment whose path continues `origin`. Returns False if it is too short for a link."""
        root = _origin_link(origin, segment.rope, segment.tenant)
        links = _first_links(root, segment.path.token_ids(origin.end, origin.end + MAX_LINKS * TOKENS_PER_LINK))
        # the last link before the segment is added too, because prompts may differ before the first link in it
        num_before = (segment.start - origin.end) // TOKENS_PER_LINK
        links = links[max(0, min(num_before, MAX_LINKS) - 1) :]
        self._links[segment.id], self._origins[segment.id] = links, origin
        for link in links:
            self._segments.setdefault(link, {})[segment.id] = segment
        return bool(links)

    def origin(self, segment: Segment) -> TokenPath:
        """The path that an indexed segment was added with."""
        return self._origins[segment.id]

    def remove(self, segment: Segment) -> None:
        """Removes a segment, if it is indexed."""
        self._origins.pop(segment.id, None)
        for link in self._links.pop(segment.id, []):
            del self._segments[link][segment.id]
            if not self._segments[link]:
                del self._segments[link]

    def match(self, origin: TokenPath, token_ids: "array[int]", rope: Rope, tenant: str) -> TokenPath:
        """The longest indexed path that consists of `origin` and a prefix of `token_ids`, and that can be continued;
        `origin` if there is none."""
        links = _first_links(_origin_link(origin, rope, tenant), token_ids)
        best, end, tried = origin, origin.end + (len(links) + 1) * TOKENS_PER_LINK, set[int]()
        for link in reversed(links):
            if best.end >= end:  # fewer common links cannot give a longer path
                break
            end -= TOKENS_PER_LINK
            for segment in islice(reversed(self._segments.get(link, {}).values()), MAX_CANDIDATES):
                is_own = segment.rope == rope and segment.tenant == tenant
                if is_own and segment.id not in tried and _continues(segment.path, origin):
                    tried.add(segment.id)
                    common = _common(self._placements, segment.path, token_ids, origin.end)
                    best = max(best, common, key=lambda path: path.end)
        return best if best.end >= origin.end + TOKENS_PER_LINK else origin

    def audit(self, segments: Iterable[Segment]) -> None:
        """Asserts that only existing segments are indexed, each under its links."""
        alive = {segment.id for segment in segments}
        assert self._links.keys() == self._origins.keys() <= alive
        for segment_id, links in self._links.items():
            assert all(segment_id in self._segments[link] for link in links)
        assert sum(map(len, self._segments.values())) == sum(map(len, self._links.values()))


def _origin_link(origin: TokenPath, rope: Rope, tenant: str) -> int:
    """The link before the first tokens after an origin."""
    return hash((origin.ids, origin.end)) if origin.segments else hash((rope, tenant))


def _first_links(link: int, token_ids: "array[int]") -> list[int]:
    return list(_chain(link, token_ids[: MAX_LINKS * TOKENS_PER_LINK], TOKENS_PER_LINK))


def _continues(path: TokenPath, origin: TokenPath) -> bool:
    """Whether the path leaves `origin` at its end."""
    count = len(origin.segments)
    is_longer = path.segments[:count] == origin.segments and len(path.segments) > count
    return is_longer and path.segments[count].start == origin.end


def _common(placements: SegmentPlacements, path: TokenPath, token_ids: "array[int]", start: int = 0) -> TokenPath:
    """The common prefix of a path and of `token_ids`, which begin at position `start`, up to a position at which the
    path can be continued."""
    num_common = path.num_common(token_ids, start)
    end, _ = placements.seams(path, min(start + num_common, placements.whole_end(path)))
    return path.cut(end)


def _chain(link: int, token_ids: "array[int]", size: int) -> Iterator[int]:
    """The links after `link`, one for each `size` tokens of `token_ids`."""
    for start in range(0, len(token_ids) - size + 1, size):
        link = hash((link, token_ids[start : start + size].tobytes()))
        yield link
