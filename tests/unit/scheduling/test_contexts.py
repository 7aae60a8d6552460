"""Contexts that are queried, extended, forked and deleted while jobs use them."""

import pytest

from coordinator.engine_messages import Acknowledged, Admitted
from longleaf.errors import AlreadyExists, NotFound, ResourceExhausted
from longleaf.rank_protocol.step import Decode
from longleaf.types import Progress
from tests.support.scheduling import Bench


def test_question_about_a_context_attends_to_its_path() -> None:
    bench = Bench()
    ingest = bench.ingest("doc", 40)
    bench.run()
    assert bench.seen[ingest] == [Progress(32, 40), Progress(40, 40), Acknowledged("doc")]
    more = bench.ingest("doc", 10, append=True)
    bench.run()
    assert bench.seen[more][-1] == Acknowledged("doc")
    job = bench.ask(5, max_tokens=2, context="doc")
    plan = bench.run()[0]
    assert isinstance(plan.work, Decode)
    row = plan.work.rows[0]
    assert (len(row.path), row.start, row.num_tokens) == (3, 50, 5)
    assert bench.seen[job][0] == Admitted(55, 50)
    assert sum(bench.scheduler.segments.tokens_by_rank()) == 50


def test_cancelled_ingest_leaves_the_context_unchanged() -> None:
    bench = Bench()
    bench.ingest("doc", 40)
    bench.run()
    free = bench.placer.num_free
    job = bench.ingest("doc", 100, append=True)
    plan = bench.schedule()
    assert plan is not None
    assert bench.scheduler.cancel(job)
    bench.scheduler.audit()
    bench.commit(plan)
    assert not bench.scheduler.cancel(job)
    assert bench.scheduler.contexts.get("doc").num_tokens == 40
    assert bench.placer.num_free == free
    bench.ask(1, max_tokens=1)
    assert bench.run()[0].release_segments == (plan.work.path[-1],)  # type: ignore[union-attr]


def test_deleted_context_stays_until_its_sequences_end() -> None:
    bench = Bench()
    bench.ingest("doc", 40)
    bench.run()
    job = bench.ask(4, max_tokens=3, context="doc")
    plan = bench.schedule()
    assert bench.scheduler.delete_context("doc") == []
    with pytest.raises(NotFound):
        bench.ask(4, context="doc")
    assert plan is not None
    bench.commit(plan)
    bench.run()
    assert len(bench.tokens(job)) == 3
    assert bench.placer.num_free == bench.placer.num_blocks


def test_deleting_a_context_cancels_its_appends() -> None:
    bench = Bench()
    bench.ingest("doc", 40)
    bench.run()
    job = bench.ingest("doc", 40, append=True)
    bench.schedule()
    assert bench.scheduler.delete_context("doc") == [job]
    bench.scheduler.audit()
    assert bench.placer.num_free == bench.placer.num_blocks


def test_name_is_reserved_when_an_ingest_starts() -> None:
    bench = Bench()
    job = bench.ingest("doc", 40)
    with pytest.raises(AlreadyExists):
        bench.ingest("doc", 1)
    with pytest.raises(NotFound):
        bench.ingest("doc", 1, append=True)
    bench.run()
    with pytest.raises(AlreadyExists):
        bench.ingest("doc", 1)
    bench.ingest("doc", 1, append=True)
    with pytest.raises(ResourceExhausted, match="another document") as caught:
        bench.ingest("doc", 1, append=True)
    assert caught.value.retry_seconds
    assert bench.seen[job][-1] == Acknowledged("doc")


def test_jobs_around_a_deleted_context_finish() -> None:
    bench = Bench(blocks=(5, 5), max_sequences=1)
    bench.ingest("doc", 20)
    bench.run()
    running = bench.ask(1, 4)
    plan = bench.schedule()
    large = bench.ask(12, 8)
    small = bench.ask(4, 2, "doc")
    bench.scheduler.delete_context("doc")
    with pytest.raises(ResourceExhausted, match="running generations") as caught:
        bench.ask(20, 20)  # it might come before the small one, which keeps the document
    assert caught.value.retry_seconds
    assert plan is not None
    bench.commit(plan)
    bench.run()
    larger = bench.ask(20, 20)
    bench.run()
    assert len(bench.tokens(running)) == 4
    assert len(bench.tokens(large)) == 8
    assert len(bench.tokens(small)) == 2
    assert len(bench.tokens(larger)) == 20


def test_fork_is_queried_and_extended_separately() -> None:
    bench = Bench()
    bench.ingest("doc", 40)
    bench.run()
    assert bench.scheduler.fork_context("doc", "fork", 30, now=3.0).num_tokens == 30
    bench.ingest("fork", 5, append=True)
    bench.ingest("doc", 5, append=True)
    bench.run()
    bench.scheduler.delete_context("doc")
    job = bench.ask(4, max_tokens=2, context="fork")
    plan = bench.run()[0]
    assert isinstance(plan.work, Decode)
    assert (len(plan.work.rows[0].path), plan.work.rows[0].start) == (3, 35)
    assert bench.seen[job][0] == Admitted(39, 35)
    bench.scheduler.delete_context("fork")
    bench.scheduler.audit()
    assert bench.placer.num_free == bench.placer.num_blocks


def test_fork_cannot_use_the_name_of_a_running_ingest() -> None:
    bench = Bench()
    bench.ingest("doc", 40)
    bench.run()
    bench.ingest("other", 40)
    with pytest.raises(AlreadyExists, match="contexts/other"):
        bench.scheduler.fork_context("doc", "other")
    bench.scheduler.fork_context("doc", "fork")
    with pytest.raises(AlreadyExists, match="contexts/fork"):
        bench.ingest("fork", 1)
