"""The longest held beginning of a prompt, against a comparison with every path."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.kv_cache.prefix_cache import PrefixIndex
from coordinator.kv_cache.segment_placement import SegmentPlacements
from coordinator.kv_cache.token_paths import Segment, TokenPath

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
    index = PrefixIndex(2, SegmentPlacements())
    index._chain = lambda link, token_ids: iter([7] * (len(token_ids) // 2))  # type: ignore[method-assign]
    for segment in segments:
        index.add(segment)
    found = index.match(array("I", prompt))
    assert found.token_ids().tolist() == prompt[: found.end]


@given(TOKENS, TOKENS)
def test_ids_in_common(a: list[int], b: list[int]) -> None:
    assert TokenPath((segment_of(0, TokenPath(), a),), len(a)).num_common(array("I", b)) == num_common(a, b)
