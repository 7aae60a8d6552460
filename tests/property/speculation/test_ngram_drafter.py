"""Drafts from paths of segments, against a search through all of a sequence's tokens."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.kv_cache.token_paths import Segment, TokenPath
from coordinator.speculation.ngram_drafter import Draft, NgramDrafter, NgramIndexes
from coordinator.speculation.ngram_index import MAX_BYTES, MAX_SIZE, SegmentIndex

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def segment_of(number: int, before: TokenPath, token_ids: list[int]) -> Segment:
    segment = Segment(number, before)
    segment.extend(token_ids)
    return segment


def longest(parts: list[tuple[int, int]], token_ids: list[int]) -> tuple[int, int]:
    """Tokens of the longest n-gram within one of the parts [start, end) that ends like all of `token_ids`, up to
    MAX_SIZE, and the position after it; of equally long ones the last."""
    best = (0, 0)
    for start, end in parts:
        for stop in range(start + 1, min(end, len(token_ids) - 1) + 1):
            size = 0
            while size < min(MAX_SIZE, stop - start) and token_ids[stop - 1 - size] == token_ids[-1 - size]:
                size += 1
            best = max(best, (size, stop))
    return best


@st.composite
def tails(draw: st.DrawFn) -> Segment:
    """A segment that grows on a path; some of its segments continue beyond the path."""
    before = TokenPath()
    for number in range(draw(st.integers(0, 4))):
        segment = segment_of(number, before, draw(TOKENS))
        before = segment.path.cut(draw(st.integers(segment.start + 1, segment.end)))
    return segment_of(9, before, draw(TOKENS))


@settings(max_examples=300)
@given(tails(), st.integers(1, 20))
def test_a_draft_goes_on_like_the_longest_ngram_and_of_those_the_last(tail: Segment, count: int) -> None:
    indexes = NgramIndexes()
    for segment in tail.before.segments:
        indexes.enter(segment, segment.end)
    text = tail.path.token_ids().tolist()
    draft = NgramDrafter(tail, indexes).draft(tail.end, count)
    size, place = longest([(start, end) for _, start, end in tail.path.parts()], text)
    expected = list[int]()
    while size and len(expected) < count:
        expected.append((text + expected)[place + len(expected)])
    assert draft == Draft(size, tuple(expected))


@given(tails(), TOKENS, st.data())
def test_a_growing_tail_is_looked_through_up_to_where_it_is_known(
    tail: Segment, more: list[int], data: st.DataObject
) -> None:
    text, indexes = tail.path.token_ids().tolist(), NgramIndexes()
    for segment in tail.before.segments:
        indexes.enter(segment, segment.end)
    drafts = NgramDrafter(tail, indexes)
    for token_id in more:
        assert drafts.draft(tail.end, 3) == NgramDrafter(tail, indexes).draft(tail.end, 3)
        known = tail.end
        refused = data.draw(TOKENS)
        tail.extend(refused)
        assert drafts.draft(known, 3) == NgramDrafter(tail, indexes).draft(known, 3)
        tail.cut(known)
        tail.extend([token_id])
        text.append(token_id)
    size, _ = longest([(start, end) for _, start, end in tail.path.parts()], text)
    assert drafts.draft(tail.end, 3).size == size


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.sampled_from((2, 50, 100_000)),
    chunks=st.lists(st.integers(1, 6000), min_size=1, max_size=8),
)
def test_tables_take_eight_bytes_per_token_whenever_one_looks(seed: int, vocabulary: int, chunks: list[int]) -> None:
    token_ids = np.random.default_rng(seed).integers(0, vocabulary, sum(chunks)).tolist()
    segment = segment_of(0, TokenPath(), token_ids)
    index, count = SegmentIndex(segment.token_ids), 0
    for chunk in chunks:
        count += chunk
        index.enter(count)
        assert index.count == count
        assert index.num_bytes <= MAX_BYTES * count


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.sampled_from((3, 50, 100_000)),
    count=st.integers(1, 12_000),
    share=st.floats(0, 1),
)
def test_drafts_from_tables_are_text_that_the_fork_has(seed: int, vocabulary: int, count: int, share: float) -> None:
    """A draft follows an earlier occurrence of the n-gram of its reported size. The parent's later tokens repeat those
    of the fork, except every fourth, which the fork does not have: it never appears.
    """
    random = np.random.default_rng(seed)
    end = 1 + int(share * (count - 1))
    text = random.integers(0, vocabulary, end).tolist()
    later = [text[i % end] if i % 4 else 100_000 + i for i in range(count - end)]
    parent = segment_of(0, TokenPath(), text + later)
    indexes = NgramIndexes()
    for stop in (*range(0, count, 1700), count):
        indexes.enter(parent, stop)
    place = int(random.integers(0, end))
    tail = segment_of(1, parent.path.cut(end), text[max(0, place - 20) : place + 1])
    draft = NgramDrafter(tail, indexes).draft(tail.end, 5)
    whole = text + list(tail.token_ids)
    suffix, found = whole[len(whole) - draft.size :], list(draft.token_ids)
    places = [i for i in range(len(whole) - draft.size) if whole[i : i + draft.size] == suffix]
    assert not draft.size or any((whole + found)[i + draft.size :][:5] == found for i in places)
