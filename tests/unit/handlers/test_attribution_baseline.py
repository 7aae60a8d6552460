"""Storage of the baselines of contexts."""

import gc
import weakref
from collections.abc import Sequence

import numpy as np

from coordinator.engine_messages import AttributionContext, SpanLayout
from coordinator.handlers.attribution_baseline import MAX_PER_SEGMENT, Baselines

LAYOUT = SpanLayout(64)


class Owner:
    """Stands for a segment."""


def context(owner: object, end: int = 100) -> AttributionContext:
    return AttributionContext(segments=(1,), ends=(end,), num_opening=4, owner=owner, block_size=64, full_layers=(0,))


def shares(value: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.full(2, value, np.float32)


def test_baseline_belongs_to_the_segment_the_end_and_the_layout() -> None:
    baselines, one, other = Baselines(), Owner(), Owner()
    baselines.put(context(one), LAYOUT, shares(0.5))
    assert baselines.get(context(one), LAYOUT) is not None
    assert baselines.get(context(one, 99), LAYOUT) is None
    assert baselines.get(context(one), SpanLayout(32)) is None
    assert baselines.get(context(other), LAYOUT) is None


def test_oldest_baselines_of_a_segment_are_dropped() -> None:
    baselines, owner = Baselines(), Owner()
    for end in range(MAX_PER_SEGMENT + 2):
        baselines.put(context(owner, end), LAYOUT, shares(end))
    stored = [end for end in range(MAX_PER_SEGMENT + 2) if baselines.get(context(owner, end), LAYOUT) is not None]
    assert stored == list(range(2, MAX_PER_SEGMENT + 2))


def test_baselines_are_freed_with_their_segment() -> None:
    baselines, owner, stored = Baselines(), Owner(), shares(0.5)
    baselines.put(context(owner), LAYOUT, stored)
    freed = weakref.ref(stored)
    del stored, owner
    gc.collect()
    assert freed() is None


async def test_neutral_question_is_encoded_once() -> None:
    calls = list[int]()

    async def question() -> Sequence[int]:
        calls.append(1)
        return (5, 6)

    baselines = Baselines(question)
    assert [*await baselines.token_ids()] == [*await baselines.token_ids()] == [5, 6]
    assert len(calls) == 1
