"""N-gram matches in long texts, the amount indexed at once, and the release of an index."""

from array import array

import numpy as np
import pytest

from coordinator.kv_cache.token_paths import EMPTY_PATH, Segment, TokenPath
from coordinator.speculation import ngram_index
from coordinator.speculation.ngram_drafter import MAX_INDEXED_TOKENS, MAX_SHORT, NO_DRAFT, NgramDrafter, NgramIndexes
from coordinator.speculation.ngram_index import MAX_SIZE, REST_TOKENS, TABLE_TOKENS, SegmentIndex


def random_ids(count: int, vocabulary: int = 50_000, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, count).tolist()


def segment_of(number: int, before: TokenPath, token_ids: list[int]) -> Segment:
    segment = Segment(number, before)
    segment.extend(token_ids)
    return segment


def indexed(segment: Segment) -> NgramIndexes:
    indexes = NgramIndexes()
    for end in range(segment.start, segment.end, 2048):
        indexes.index_segment(segment, end)
    indexes.index_segment(segment, segment.end)
    return indexes


def test_quote_is_found_in_any_segment() -> None:
    document = segment_of(0, EMPTY_PATH, random_ids(3 * TABLE_TOKENS))
    indexes = indexed(document)
    for place in range(20, document.end - 8, 997):
        tail = segment_of(1, document.path, document.token_ids[place - MAX_SIZE : place].tolist())
        draft = NgramDrafter(tail, indexes).draft(tail.end, 7)
        assert draft.size == MAX_SIZE
        assert draft.token_ids == tuple(document.token_ids[place : place + 7])


def test_last_of_equal_ngrams_before_the_fork_is_found() -> None:
    quote = random_ids(10, seed=1)
    text = random_ids(20_000)
    for n, place in enumerate((3000, 3500, 3600, 3700)):
        text[place : place + 11] = [*quote, 60_000 + n]
    parent = segment_of(0, EMPTY_PATH, text)
    indexes = indexed(parent)
    for end, expected in ((3400, 60_000), (3550, 60_001), (3650, 60_002), (3709, 60_002), (3710, 7), (3711, 60_003)):
        tail = segment_of(1, parent.path.cut(end), [7, *quote])
        assert NgramDrafter(tail, indexes).draft(tail.end, 1).token_ids == (expected,)


def test_match_continues_into_later_segments_and_into_itself() -> None:
    first = segment_of(0, EMPTY_PATH, [1, 2, 3, 4])
    second = segment_of(1, first.path.cut(3), [5])
    tail = segment_of(2, second.path, [6, 1, 2])
    indexes = NgramIndexes()
    indexes.index_segment(first, first.end)
    indexes.index_segment(second, second.end)
    assert NgramDrafter(tail, indexes).draft(tail.end, 9).token_ids == (3, 5, 6, 1, 2, 3, 5, 6, 1)


def test_query_extends_back_into_the_path() -> None:
    document = segment_of(0, EMPTY_PATH, [1, 2, 3, 4, 9, 2, 3])
    tail = segment_of(1, document.path, [4])
    assert NgramDrafter(tail, indexed(document)).draft(tail.end, 1) == (3, (9,))


def test_unknown_ngram_has_no_draft() -> None:
    document = segment_of(0, EMPTY_PATH, random_ids(5000))
    tail = segment_of(1, document.path, [60_000])
    assert NgramDrafter(tail, indexed(document)).draft(tail.end, 7) is NO_DRAFT


def test_hash_collisions_yield_no_wrong_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_index, "MULTIPLIERS", (0,) * ngram_index.CHAINED)
    document = segment_of(0, EMPTY_PATH, random_ids(5000))
    indexes = indexed(document)
    tail = segment_of(1, document.path, document.token_ids[4090:4096].tolist())
    assert NgramDrafter(tail, indexes).draft(tail.end, 7).size in (0, 6)
    tail = segment_of(1, document.path, [60_000])
    assert NgramDrafter(tail, indexes).draft(tail.end, 7) is NO_DRAFT


def test_text_of_one_repeated_token_is_searched_quickly() -> None:
    document = segment_of(0, EMPTY_PATH, [3] * 9000 + [4] + [3] * 9000)
    tail = segment_of(1, document.path, [3] * 5)
    draft = NgramDrafter(tail, indexed(document)).draft(tail.end, 4)
    assert draft == (MAX_SIZE, (3, 3, 3, 3))


class CountingArray(array):
    """Ids that count accesses to single elements."""

    num_read = 0

    def __getitem__(self, place):
        self.num_read += 1
        return super().__getitem__(place)


@pytest.mark.parametrize(
    ("text", "query", "found"),
    [
        ([5] * 1000, [7, 5, 5], (2, 999)),
        ([5] * 1000, [7, *[5] * 9], (9, 999)),
        ([5] * 1000, [5] * 20, (MAX_SIZE, 999)),
        ([5, 6] * 500, [7, 5, 6, 5], (3, 998)),
        ([9, 3, 5, 5] * 250, [8, 9, 4, 5, 5], (2, 999)),
        ([9, 3, 5, 5] * 250, [8, 3, 5, 5, 9, 4], (0, -1)),
        ([1, 2, 3, 4, *[3, 4] * 300], [0, 1, 2, 3, 4], (4, 3)),
    ],
)
def test_unindexed_tokens_are_not_scanned_one_by_one(text, query, found) -> None:
    ids = CountingArray("I", text)
    segment, match = SegmentIndex(ids), ngram_index.NgramMatch(query[-MAX_SIZE:])
    segment.add(len(ids))
    segment.match(match, len(ids))
    assert (match.size, match.offset) == found
    assert ids.num_read <= 4 * (MAX_SIZE + 1)


def test_indexing_in_chunks_equals_indexing_at_once() -> None:
    token_ids = array("I", random_ids(30_000, vocabulary=40))
    whole, growing = SegmentIndex(token_ids), SegmentIndex(token_ids)
    whole.add(len(token_ids))
    for count in (*range(0, len(token_ids), 1), len(token_ids)):
        growing.add(count)
    for place in range(100, len(token_ids), 501):
        found = list[tuple[int, ...]]()
        for each in (whole, growing):
            match = ngram_index.NgramMatch(token_ids[place - 9 : place])
            match.begin(0)
            each.match(match, len(token_ids))
            found.append((match.size, *token_ids[match.offset - match.size + 1 : match.offset + 1]))
        assert found[0] == found[1] == (9, *token_ids[place - 9 : place])


def test_unindexed_tokens_are_indexed_later_in_parts() -> None:
    first = segment_of(0, EMPTY_PATH, random_ids(5000, seed=1))
    second = segment_of(1, first.path.cut(4000), random_ids(3000, seed=2))
    indexes = NgramIndexes()
    tail = segment_of(2, second.path, first.token_ids[1000:1010].tolist())
    drafts = NgramDrafter(tail, indexes)
    assert drafts.draft(tail.end, 3) is NO_DRAFT
    assert not drafts.index_path(2000)
    assert not drafts.index_path(2000)
    assert (indexes.get(first).count, indexes.get(second).count) == (1000, 3000)
    assert not drafts.index_path(2999)
    assert drafts.index_path(1)
    assert drafts.index_path(0)
    assert indexes.get(first).count == 4000
    assert drafts.draft(tail.end, 3) == (10, tuple(first.token_ids[1010:1013]))


def test_long_tail_is_indexed_in_parts() -> None:
    tail = segment_of(0, EMPTY_PATH, random_ids(3 * MAX_INDEXED_TOKENS))
    indexes = NgramIndexes()
    drafts = NgramDrafter(tail, indexes)
    for turn in range(1, 4):
        drafts.draft(tail.end, 1)
        assert indexes.get(tail).count == min(turn * MAX_INDEXED_TOKENS, tail.end - 1)


def test_last_and_long_segments_of_a_long_path_are_searched() -> None:
    document = segment_of(9999, EMPTY_PATH, random_ids(5000))
    path, indexes, segments = document.path, indexed(document), list[Segment]()
    for number in range(MAX_SHORT + 5):
        segments.append(segment_of(number, path, [60_000 + 3 * number, 60_001 + 3 * number]))
        path = segments[-1].path
        indexes.index_segment(segments[-1], path.end)
    for number, is_found in ((4, False), (5, True), (MAX_SHORT + 4, True)):
        tail = segment_of(999, path, [60_000 + 3 * number])
        found = NgramDrafter(tail, indexes).draft(tail.end, 1).token_ids
        assert found == ((60_001 + 3 * number,) if is_found else ())
    tail = segment_of(999, path, document.token_ids[4990:4998].tolist())
    after = (*document.token_ids[4998:], 60_000, 60_001, 60_003)
    assert NgramDrafter(tail, indexes).draft(tail.end, 5) == (8, after)


def test_index_is_freed_with_its_segment_and_does_not_block_growth() -> None:
    indexes, segment = NgramIndexes(), segment_of(0, EMPTY_PATH, random_ids(REST_TOKENS))
    tail = segment_of(1, segment.path, [1])
    indexes.index_segment(segment, segment.end)
    drafts = NgramDrafter(tail, indexes)
    drafts.draft(tail.end, 1)
    segment.extend([1, 2])  # an array with an open view cannot grow
    tail.extend([3])
    assert len(indexes) == 2
    assert indexes.num_bytes > 0
    del segment, tail, drafts
    assert len(indexes) == 0
    assert indexes.num_bytes == 0


def test_ngram_ending_at_the_first_unindexed_token_is_found() -> None:
    text = random_ids(REST_TOKENS + 9)
    text[-2] = text[REST_TOKENS]
    document = segment_of(0, EMPTY_PATH, text)
    indexes = NgramIndexes()
    indexes.index_segment(document, REST_TOKENS)
    indexes.index_segment(document, document.end)
    tail = segment_of(1, document.path, text[REST_TOKENS - 4 : REST_TOKENS + 1])
    assert NgramDrafter(tail, indexes).draft(tail.end, 1) == (5, (text[REST_TOKENS + 1],))


def test_query_does_not_match_itself() -> None:
    tail = segment_of(0, EMPTY_PATH, [5, 6, 7, 8, 6, 7])
    indexes = NgramIndexes()
    indexes.index_segment(tail, tail.end)
    assert NgramDrafter(tail, indexes).draft(tail.end, 2) == (2, (8, 6))
