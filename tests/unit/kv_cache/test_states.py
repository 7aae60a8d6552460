"""Recurrent states on every rank: their slots, their lifetime, and the positions that can be continued."""

import pytest
from msgspec.structs import replace

from coordinator.kv_cache.block_placer import BlockCount
from coordinator.kv_cache.contexts import LAST_ENDS
from longleaf.errors import InvalidArgument, ResourceExhausted
from longleaf.positions import EVERY_RANK, STATE_SPAN, WindowSpec
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.step import Decode, Prefill, StepPlan
from tests.support.random_drafter import RandomDrafter
from tests.support.scheduling import Asker, Bench

STATES = WindowSpec(reaches=(STATE_SPAN,), num_blocks=20, is_state=True)


def state_runs(plans: list[StepPlan]) -> list[list[tuple[int, int]]]:
    """First position and end of each run, by plan; each position has a separate slot."""
    found: list[list[tuple[int, int]]] = []
    for plan in map(RowState(1).complete, plans):
        work = plan.work if isinstance(plan.work, Prefill) else plan.work.rows[0]
        assert all(run.rank == EVERY_RANK and len(run.blocks) == len(run) for run in work.window_runs)
        found.append([run.range for run in work.window_runs])
    return found


def test_document_keeps_the_state_at_its_end() -> None:
    bench = Asker(windows=STATES)
    bench.ingest("doc", 40)
    assert state_runs(bench.run()) == [[(31, 32)], [(31, 32), (39, 40)]]
    (segment,) = bench.scheduler.contexts.get("doc").path.segments
    assert [run.range for run in bench.scheduler.segments.placements[segment].window_runs] == [(39, 40)]
    assert bench.placer.num_free == bench.placer.num_blocks - BlockCount(10, 1)


def test_answer_holds_the_last_two_states() -> None:
    """The state before a row stays until the next one, because its tokens may be dropped after the end of an answer."""
    bench = Asker(windows=STATES)
    job = bench.ask(3, max_tokens=5)
    assert state_runs(bench.run()) == [[(2, 3)], [(2, 4)], [(3, 5)], [(4, 6)], [(5, 7)]]
    assert bench.tokens(job) == bench.alone(3, 5)
    assert bench.placer.num_free == bench.placer.num_blocks


def test_the_last_two_tokens_of_a_prompt_are_computed_together() -> None:
    bench = Asker(windows=STATES)
    job = bench.prompt(range(41))
    works = [plan.work for plan in bench.run()]
    row = next(work.rows[0] for work in works if isinstance(work, Decode))
    assert (row.start, row.token_ids) == (39, (39, 40))
    again = bench.prompt(range(41))
    bench.run()
    assert [bench.cached(job), bench.cached(again)] == [0, 39]


def test_fork_at_an_end_takes_no_state() -> None:
    bench = Asker(windows=STATES)
    for count, append in ((40, False), (3, True)):
        bench.ingest("doc", count, append=append)
        bench.run()
    num_free = bench.placer.num_free
    for position in (40, 43):
        bench.scheduler.fork_context("doc", f"fork-{position}", position)
    assert bench.placer.num_free == num_free
    bench.scheduler.delete_context("doc")
    assert bench.placer.num_blocks.windows - bench.placer.num_free.windows == 2
    job = bench.ask(9, context="fork-40")
    bench.run()
    assert bench.tokens(job) == bench.alone(9, 4)


@pytest.mark.parametrize(("position", "nearest"), [(1, "at 40"), (39, "at 40"), (41, "at 40 or 43")])
def test_fork_elsewhere_is_refused_with_the_nearest_positions(position: int, nearest: str) -> None:
    bench = Asker(windows=STATES)
    for count, append in ((40, False), (3, True)):
        bench.ingest("doc", count, append=append)
        bench.run()
    with pytest.raises(InvalidArgument, match=f"with a model with recurrent states, .*nearest {nearest}$") as caught:
        bench.scheduler.fork_context("doc", "fork", position)
    assert caught.value.field == "token_count"


def test_context_keeps_the_states_of_its_last_ends() -> None:
    bench = Asker(windows=STATES)
    for number in range(LAST_ENDS + 3):
        bench.ingest("doc", 5, append=number > 0)
        bench.run()
    assert bench.placer.num_blocks.windows - bench.placer.num_free.windows == LAST_ENDS
    with pytest.raises(InvalidArgument, match="nearest at 20"):
        bench.scheduler.fork_context("doc", "fork", 15)


def test_samples_have_separate_states() -> None:
    bench = Asker(windows=STATES)
    job = bench.prompt(range(41), max_tokens=6, num_samples=3)
    rows = list(map(RowState(1).complete, bench.run()))[-1].work
    assert isinstance(rows, Decode)
    assert len({block for row in rows.rows for run in row.window_runs for block in run.blocks}) == 3 * 2
    assert [bench.answer(job, sample) for sample in range(3)] == [bench.answer(job)] * 3


def test_a_job_without_room_for_its_states_waits_or_is_refused() -> None:
    """A prompt needs two states for its chunks, and each sample two for its answer."""
    bench = Asker(windows=replace(STATES, num_blocks=5))
    with pytest.raises(InvalidArgument, match="the state pool has 5 recurrent states, and 6 are needed"):
        bench.prompt(range(20), num_samples=2)
    first, second = bench.prompt(range(20)), bench.prompt(range(100, 120))
    bench.run()
    assert all(len(bench.answer(job)) == 4 for job in (first, second))
    for number in range(3):
        bench.ingest(f"doc-{number}", 9)
        bench.run()
    with pytest.raises(ResourceExhausted, match="recurrent states are needed, and contexts use too many of 5"):
        bench.ask(20)


def num_used(bench: Bench) -> int:
    return bench.placer.num_blocks.windows - bench.placer.num_free.windows


@pytest.mark.parametrize("kind", RandomDrafter.KINDS)
def test_drafts_have_states_until_their_step_ends(kind: str) -> None:
    bench = Bench(windows=STATES, drafts=kind, max_draft_tokens=3, block_size=32)
    jobs = [bench.ask(count, max_tokens=50, max_draft_tokens=3) for count in (20, 25)]
    num_drafts = 0
    while (plan := bench.schedule()) is not None:
        before = num_used(bench)
        bench.commit(plan)
        if plan.num_drafts:
            num_drafts += plan.num_drafts
            assert num_used(bench) <= before - plan.num_drafts
    assert num_drafts
    assert num_used(bench) == 2, "the ends of both prompts are cached"
    assert [bench.tokens(job) for job in jobs] == [bench.alone(count, 50) for count in (20, 25)]


@pytest.mark.parametrize("num_states", [4, 5, 6])
def test_drafts_take_no_states_that_are_reserved(num_states: int) -> None:
    """A generation has four states reserved, and gives one back once its prompt is computed."""
    windows = replace(STATES, num_blocks=num_states)
    bench = Bench(windows=windows, drafts="right", max_draft_tokens=3, block_size=32)
    job = bench.ask(20, max_tokens=50, max_draft_tokens=3)
    assert max(plan.num_drafts for plan in bench.run()) == num_states - 3
    assert bench.tokens(job) == bench.alone(20, 50)
