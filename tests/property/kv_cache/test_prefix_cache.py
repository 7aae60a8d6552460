"""The longest cached prefix of a prompt, against a comparison with every path."""

from array import array
from collections.abc import Iterator
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.kv_cache.prefix_cache import ContinuationIndex, PrefixIndex
from coordinator.kv_cache.segment_placement import SegmentPlacements
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.positions import OWN_ROPE
from longleaf.tenants import DEFAULT_TENANT

LINK = "coordinator.kv_cache.prefix_cache.TOKENS_PER_LINK"
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def segment_of(number: int, before: TokenPath, token_ids: list[int]) -> Segment:
    segment = Segment(number, before)
    segment.extend(token_ids)
    segment.is_sealed = True
    return segment


@st.composite
def forests(draw: st.DrawFn) -> list[Segment]:
    """Segments that continue nothing, or an earlier one from any position of it on."""
    segments: list[Segment] = []
    for number in range(draw(st.integers(1, 7))):
        before = TokenPath()
        if segments and draw(st.booleans()):
            parent = draw(st.sampled_from(segments))
            before = parent.path.cut(draw(st.integers(parent.start + 1, parent.end)))
        segments.append(segment_of(number, before, draw(TOKENS)))
    return segments


def num_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=300)
@given(forests(), st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 1), max_size=40), st.data())
def test_the_longest_cached_prefix_is_found(
    segments: list[Segment], block_size: int, blocks_at_once: int, prompt: list[int], data: st.DataObject
) -> None:
    index = PrefixIndex(block_size, SegmentPlacements(), blocks_at_once)
    for segment in segments:
        index.add(segment)
    index.audit(segments)
    prompt = data.draw(st.sampled_from([s.path.token_ids().tolist() for s in segments])) + prompt
    for gone in range(len(segments) + 1):
        alive = segments[: len(segments) - gone]
        found = index.match(array("I", prompt))
        found.audit()
        assert found.token_ids().tolist() == prompt[: found.end]
        assert set(found.segments) <= set(alive)
        longest = max((num_common(s.path.token_ids().tolist(), prompt) for s in alive), default=0)
        # the rest of a block may be continued by a segment in which no block ends
        assert longest - longest % block_size <= found.end <= longest
        assert found.end == 0 or found.end >= block_size
        if alive:
            index.remove(alive[-1])  # those that continue others go first
            index.audit(alive[:-1])


@given(forests(), st.lists(st.integers(0, 1), max_size=20))
def test_equal_hashes_are_no_match(segments: list[Segment], prompt: list[int]) -> None:
    def chain(link: int, token_ids: "array[int]", size: int) -> Iterator[int]:
        return iter([7] * (len(token_ids) // size))

    with patch("coordinator.kv_cache.prefix_cache._chain", chain), patch(LINK, 2):
        index, continuations = PrefixIndex(2, SegmentPlacements()), ContinuationIndex(SegmentPlacements())
        for segment in segments:
            index.add(segment)
            continuations.add(segment, TokenPath())
        token_ids = array("I", prompt)
        for found in (index.match(token_ids), continuations.match(TokenPath(), token_ids, OWN_ROPE, DEFAULT_TENANT)):
            assert found.token_ids().tolist() == prompt[: found.end]


@settings(max_examples=300)
@given(forests(), st.integers(1, 4), st.lists(st.integers(0, 1), max_size=40), st.data())
def test_the_longest_cached_turn_after_an_origin_is_found(
    segments: list[Segment], tokens_per_link: int, more: list[int], data: st.DataObject
) -> None:
    """The origin is any path to a segment; the other segments that continue it were cached after it."""
    first = data.draw(st.sampled_from([None, *segments]))
    origin = TokenPath() if first is None else first.path
    continued = [s for s in segments if is_after(s.path, origin)]
    turn = data.draw(st.sampled_from([s.path.token_ids(origin.end).tolist() for s in continued] or [[]])) + more
    with patch(LINK, tokens_per_link):
        index = ContinuationIndex(SegmentPlacements())
        for segment in continued:
            is_found = index.add(segment, origin)
            assert is_found == (segment.end - origin.end >= tokens_per_link)
            assert index.origin(segment) is origin
        for gone in range(len(continued) + 1):
            alive = continued[: len(continued) - gone]
            index.audit(alive)
            found = index.match(origin, array("I", turn), OWN_ROPE, DEFAULT_TENANT)
            found.audit()
            assert found.segments[: len(origin.segments)] == origin.segments
            assert found.token_ids(origin.end).tolist() == turn[: found.end - origin.end]
            longest = max((num_common(s.path.token_ids(origin.end).tolist(), turn) for s in alive), default=0)
            assert found.end - origin.end == (longest if longest >= tokens_per_link else 0)
            if alive:
                index.remove(alive[-1])


def test_contexts_and_tenants_share_no_turns() -> None:
    contexts = [segment_of(i, TokenPath(), [1, 2, 3]).path for i in range(2)]
    turn = array("I", range(40))
    index = ContinuationIndex(SegmentPlacements())
    index.add(segment_of(2, contexts[0], turn.tolist()), contexts[0])
    index.add(segment_of(3, TokenPath(), turn.tolist()), TokenPath())
    for origin, tenant, num_found in (
        (contexts[0], DEFAULT_TENANT, 40),
        (contexts[1], DEFAULT_TENANT, 0),
        (contexts[0].cut(2), DEFAULT_TENANT, 0),
        (TokenPath(), DEFAULT_TENANT, 40),
        (TokenPath(), "acme", 0),
    ):
        assert index.match(origin, turn, OWN_ROPE, tenant).end == origin.end + num_found


def is_after(path: TokenPath, origin: TokenPath) -> bool:
    """Whether a path leaves the origin at its end."""
    count = len(origin.segments)
    is_longer = path.segments[:count] == origin.segments and len(path.segments) > count
    return is_longer and path.segments[count].start == origin.end


@given(TOKENS, TOKENS)
def test_ids_in_common(a: list[int], b: list[int]) -> None:
    assert TokenPath((segment_of(0, TokenPath(), a),), len(a)).num_common(array("I", b)) == num_common(a, b)
