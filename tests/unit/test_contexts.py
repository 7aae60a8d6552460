"""Segments, references and contexts."""

import pytest

from coordinator.blocks import Placer
from coordinator.contexts import Contexts, Segment, Segments
from longleaf.errors import NotFound


class Store:
    def __init__(self) -> None:
        self.placer = Placer([8, 8], 4)
        self.segments = Segments(self.placer)
        self.contexts = Contexts(self.segments)

    def segment(self, start: int, count: int) -> Segment:
        segment = self.segments.create(start)
        reservation = self.placer.reserve(self.placer.blocks_needed(count, 0))
        assert reservation is not None
        segment.extend(range(count), self.placer.place_chunk(start, start + count, 0, reservation))
        return segment

    def check(self) -> None:
        self.segments.check()
        self.contexts.check()
        self.placer.check(run for segment in self.segments for run in segment.runs)


def test_context_grows_by_sealed_segments() -> None:
    store = Store()
    store.contexts.append("a", store.segment(0, 10), now=5.0)
    store.contexts.append("a", store.segment(10, 3), now=7.0)
    context = store.contexts.get("a")
    assert (context.num_tokens, context.created, context.updated) == (13, 5.0, 7.0)
    assert sum(context.shares(2)) == 13
    assert all(segment.is_sealed for segment in context.path)
    store.check()


def test_deleted_context_lives_as_long_as_somebody_reads_it() -> None:
    store = Store()
    store.contexts.append("a", store.segment(0, 10), now=0.0)
    path = store.contexts.get("a").path
    store.segments.retain(path)
    store.contexts.delete("a")
    store.check()
    assert (store.placer.num_free, store.segments.take_forgotten()) == (13, ())
    store.segments.release(path)
    store.check()
    assert (store.placer.num_free, store.segments.take_forgotten()) == (16, (path[0].id,))
    assert store.segments.take_forgotten() == ()


def test_segment_that_no_rank_knows_is_not_forgotten() -> None:
    store = Store()
    store.segments.release([store.segments.create(0)])
    assert store.segments.take_forgotten() == ()


def test_missing_context() -> None:
    store = Store()
    for call in (store.contexts.get, store.contexts.delete):
        with pytest.raises(NotFound, match="contexts/a does not exist"):
            call("a")


def test_contexts_are_listed_by_id() -> None:
    store = Store()
    for name in "cab":
        store.contexts.append(name, store.segment(0, 1), now=0.0)
    assert [context.id for context in store.contexts.list()] == ["a", "b", "c"]
