"""Segments, references and contexts."""

from collections.abc import Iterator

import pytest

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.errors import AlreadyExists, InvalidArgument, NotFound
from longleaf.positions import OWN_ROPE
from longleaf.tenants import DEFAULT_TENANT
from longleaf.types import ContextSettings


class Store:
    def __init__(self) -> None:
        self.placer = BlockPlacer([8, 8], 4)
        self.segments = SegmentStore(self.placer)
        self.contexts = ContextTable(self.segments)

    def segment(self, before: TokenPath, count: int) -> Segment:
        """A segment with one reference, from `create`."""
        placement, start = self.segments.create(before, OWN_ROPE, DEFAULT_TENANT), before.end
        reservation = self.placer.reserve(self.placer.blocks_needed(count, 0))
        assert reservation is not None
        placement.extend(range(count), self.placer.place_chunk(start, start + count, 0, reservation))
        return placement.segment

    def append(self, context: str, before: TokenPath, count: int, now: float = 0.0) -> None:
        segment = self.segment(before, count)
        self.contexts.append(context, segment, now)
        self.segments.drop(segment)

    def audit(self) -> None:
        self.segments.audit()
        self.contexts.audit()
        self.placer.audit(run for placement in self.segments.placements for run in placement.runs)

    def shares(self, context: NamedContext) -> list[int]:
        return self.segments.placements.shares(context.path, 2)


def test_context_grows_by_sealed_segments() -> None:
    store = Store()
    store.append("a", TokenPath(), 10, now=5.0)
    store.append("a", store.contexts.get("a").path, 3, now=7.0)
    context = store.contexts.get("a")
    assert (context.num_tokens, context.record.created, context.record.updated) == (13, 5.0, 7.0)
    assert sum(store.shares(context)) == 13
    assert all(segment.is_sealed for segment in context.path.segments)
    store.audit()


def test_deleted_context_is_freed_after_its_last_reader() -> None:
    store = Store()
    store.append("a", TokenPath(), 10, now=0.0)
    path = store.contexts.get("a").path
    store.segments.retain(path)
    store.contexts.delete("a")
    store.audit()
    assert (store.placer.num_free, store.segments.pop_forgotten()) == (BlockCount(13), ())
    store.segments.release(path)
    store.audit()
    assert (store.placer.num_free, store.segments.pop_forgotten()) == (BlockCount(16), (path.segments[0].id,))
    assert store.segments.pop_forgotten() == ()


def test_segment_unknown_to_ranks_is_not_reported_as_forgotten() -> None:
    store = Store()
    store.segments.drop(store.segments.create(TokenPath(), OWN_ROPE, DEFAULT_TENANT).segment)
    assert store.segments.pop_forgotten() == ()


def test_missing_context_raises_not_found() -> None:
    store = Store()
    for call in (store.contexts.get, store.contexts.delete):
        with pytest.raises(NotFound, match="contexts/a does not exist"):
            call("a")


def test_contexts_are_listed_by_id() -> None:
    store = Store()
    for name in "cab":
        store.append(name, TokenPath(), 1, now=0.0)
    assert [context.id for context in store.contexts.list()] == ["a", "b", "c"]
    assert [context.id for context in store.contexts.of_tenant(DEFAULT_TENANT, "a", 1)] == ["b"]
    assert [context.id for context in store.contexts.of_tenant(DEFAULT_TENANT, "aa")] == ["b", "c"]
    store.contexts.delete("b")
    assert [context.id for context in store.contexts.of_tenant(DEFAULT_TENANT, "a", 5)] == ["c"]
    assert store.contexts.of_tenant(DEFAULT_TENANT, "c", 5) == []
    assert store.contexts.of_tenant("a", "", 5) == []
    store.contexts.audit()


def forked_store() -> Store:
    """`a` of segments [0, 10) and [10, 13)."""
    store = Store()
    store.append("a", TokenPath(), 10, now=5.0)
    store.append("a", store.contexts.get("a").path, 3, now=7.0)
    return store


@pytest.mark.parametrize(
    ("num_tokens", "parts"), [(None, [10, 13]), (13, [10, 13]), (11, [10, 11]), (10, [10]), (1, [1])]
)
def test_fork_shares_segments_and_copies_nothing(num_tokens: int | None, parts: list[int]) -> None:
    store = forked_store()
    free = store.placer.num_free
    fork = store.contexts.fork("a", "b", num_tokens, now=9.0)
    assert [end for _, _, end in fork.path.parts()] == parts
    assert fork.path.segments == store.contexts.get("a").path.segments[: len(parts)]
    assert (fork.num_tokens, sum(store.shares(fork)), fork.record.created, fork.record.updated) == (
        parts[-1],
        parts[-1],
        9.0,
        9.0,
    )
    assert store.placer.num_free == free
    store.audit()


def test_fork_outlives_its_source_and_grows_separately() -> None:
    store = forked_store()
    fork = store.contexts.fork("a", "b", 4, now=9.0)
    first, second = store.contexts.get("a").path.segments
    store.contexts.delete("a")
    store.audit()
    assert store.segments.pop_forgotten() == (second.id,)
    store.append("b", fork.path, 5, now=11.0)
    store.audit()
    assert next((s.id, start, end) for s, start, end in fork.path.parts()) == (first.id, 0, 4)
    assert (fork.num_tokens, sum(store.shares(fork)), fork.record.updated) == (9, 9, 11.0)
    branch = store.contexts.fork("b", "c", 3, now=12.0)
    store.contexts.delete("b")
    assert branch.path == TokenPath((first,), 3)
    store.contexts.delete("c")
    assert store.placer.num_free == BlockCount(16)


def test_invalid_forks_name_the_field() -> None:
    store = forked_store()
    with pytest.raises(NotFound, match="contexts/x"):
        store.contexts.fork("x", "b", None, now=0.0)
    with pytest.raises(AlreadyExists, match="contexts/a"):
        store.contexts.fork("a", "a", None, now=0.0)
    for wrong in (-1, 0, 14):
        with pytest.raises(
            InvalidArgument, match=f"{wrong} is not between 1 and 13, the tokens of contexts/a"
        ) as caught:
            store.contexts.fork("a", "b", wrong, now=0.0)
        assert caught.value.field == "token_count"
    store.audit()


class LookupOnlyMapping(dict[str, NamedContext]):
    """A mapping that supports lookup but not iteration."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all contexts are walked through")

    values = items = keys = __iter__  # type: ignore[assignment]


def test_expired_contexts_are_found_without_a_full_scan() -> None:
    store = Store()
    for name, ttl in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", None)):
        store.append(name, TokenPath(), 1)
        store.contexts.change(name, ContextSettings(ttl=ttl) if ttl else ContextSettings(), now=0.0)
    contexts = store.contexts
    contexts._by_id = LookupOnlyMapping(contexts._by_id)
    assert (contexts.next_expiry, contexts.expired(2.5)) == (1.0, ("b", "c"))
    contexts.delete("b")
    contexts.delete("d")
    assert (contexts.next_expiry, contexts.expired(2.5)) == (2.0, ("c",))
    contexts.change("c", ContextSettings(is_pinned=True), now=0.0)
    assert (contexts.next_expiry, contexts.expired(2.5)) == (3.0, ())
    contexts.change("c", ContextSettings(is_pinned=False), now=0.0)
    contexts.change("a", ContextSettings(expires=None), now=0.0)
    assert (contexts.next_expiry, contexts.expired(9.0)) == (2.0, ("c",))
    contexts.delete("c")
    assert (contexts.next_expiry, contexts.expired(9.0)) == (None, ())
