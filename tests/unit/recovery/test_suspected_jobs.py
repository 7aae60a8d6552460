"""Poison jobs are identified, and no other job is blamed."""

from collections import deque

from coordinator.engine_messages import Failed
from coordinator.recovery.fault_score import LOSS_SCORE
from longleaf.errors import Unavailable
from longleaf.rank_protocol.step import Decode, Prefill, StepPlan
from tests.support.ranks_that_change import Group


def rows(plan: StepPlan) -> list[int]:
    return [row.sequence for row in plan.work.rows] if isinstance(plan.work, Decode) else []


def test_job_that_breaks_two_epochs_fails_alone() -> None:
    group = Group()
    poison, other = group.ask(9, max_tokens=6), group.ask(9, max_tokens=6)
    rows = 0
    while not isinstance(group.seen.get(poison, [None])[-1], Failed):
        plan = group.schedule()
        assert plan is not None
        together = [row.sequence for row in plan.work.rows] if isinstance(plan.work, Decode) else []
        if poison in together and len(group.tokens(poison)) == 2:
            rows = len(together)
            group.change(0, 1, 2, 3, steps=(plan.step,))
        else:
            group.commit(plan)
    assert rows == 1, "the second time it ran in isolation"
    assert group.tokens(poison) == group.alone(9, 2)
    error = group.seen[poison][-1]
    assert isinstance(error, Failed) and isinstance(error.error, Unavailable)
    group.run()
    assert group.tokens(other) == group.alone(9, 6)


def test_epoch_that_breaks_outside_a_step_blames_no_job() -> None:
    group = Group()
    job = group.ingest("a", 64)
    for _ in range(4):
        group.schedule()
        group.change(0, 1, 2, 3)
    group.run()
    assert "a" in group.contexts()
    assert not any(isinstance(event, Exception) for event in group.seen[job])


def test_recomputation_that_breaks_two_epochs_drops_its_context() -> None:
    group = Group()
    group.document("a", 64)
    group.document("b", 64)
    group.change(0, 1, 2)
    for _ in range(2):
        plan = group.schedule()
        assert plan is not None
        group.change(0, 1, 2, steps=(plan.step,))
    assert [dropped.context for dropped in group.scheduler.job_recovery.pop_dropped()] == ["a"]
    group.run()
    assert group.contexts() == ["b"]
    assert group.holds("b")


def test_recomputation_with_progress_survives_another_loss() -> None:
    group = Group()
    group.document("a", 128)
    group.change(0, 1, 2)
    for before in ((0, 1, 2), (0, 1)):
        plan = group.schedule()
        assert plan is not None and isinstance(plan.work, Prefill)
        group.change(*before, steps=(plan.step,))
        group.step()
    assert group.scheduler.job_recovery.pop_dropped() == []
    group.run()
    assert group.holds("a")


def test_job_that_kills_ranks_in_four_epochs_fails_alone() -> None:
    group = Group()
    deadly, other = group.ask(9, max_tokens=6), group.ask(9, max_tokens=6)
    together = list[int]()
    while not isinstance(group.seen.get(deadly, [None])[-1], Failed):
        plan = group.schedule()
        assert plan is not None
        if deadly in rows(plan) and len(group.tokens(deadly)) == 2:
            together.append(len(rows(plan)))
            group.change(0, 1, 2, None, steps=(plan.step,), suspicion=LOSS_SCORE)
        else:
            group.commit(plan)
    assert together == [2, 2, 1, 1], "one loss isolates no job"
    assert group.tokens(deadly) == group.alone(9, 2)
    group.run()
    assert group.tokens(other) == group.alone(9, 6)


def test_suspected_job_is_computed_in_isolation() -> None:
    """A rank may die before it sends its last result."""
    group = Group()
    group.document("a", 64)
    group.change(0, 1, 2, None)
    deadly, num_alone = group.ask(9, max_tokens=6), 0
    while not isinstance(group.seen.get(deadly, [None])[-1], Failed):
        plans = [plan for plan in (group.schedule(), group.schedule()) if plan is not None]
        at = next((i for i, plan in enumerate(plans) if deadly in rows(plan)), None)
        if at is None:
            for plan in plans:
                group.commit(plan)
        else:
            num_alone += len(plans) == 1
            group.change(0, 1, 2, 3, steps=tuple(plan.step for plan in plans), suspicion=LOSS_SCORE)
    assert num_alone >= 2
    assert group.scheduler.job_recovery.pop_dropped() == []
    group.run()
    assert group.holds("a")


def _tokens(group: Group, job: int) -> list[int]:
    return group.tokens(job) if job in group.seen else []


def _drive(group: Group, plans: deque[StepPlan]) -> None:
    """One step of ranks that have two plans in flight if there are two."""
    while len(plans) < 2 and (plan := group.schedule()):
        plans.append(plan)
    group.commit(plans.popleft())


def test_isolated_prompt_makes_progress_beside_answers() -> None:
    group, plans = Group(), deque[StepPlan]()
    other = group.ask(9, max_tokens=60)
    while not _tokens(group, other):
        group.step()
    suspected = group.ask(64, max_tokens=2)
    plan = group.schedule()
    assert plan is not None and isinstance(plan.work, Prefill)
    group.change(0, 1, 2, 3, steps=(plan.step,))
    while not _tokens(group, suspected):
        _drive(group, plans)
    assert len(group.tokens(other)) < 30


def test_isolated_answer_makes_progress_beside_prefills() -> None:
    group, plans = Group(), deque[StepPlan]()
    suspected = group.ask(9, max_tokens=6)
    while not _tokens(group, suspected):
        group.step()
    plan = group.schedule()
    assert plan is not None and suspected in rows(plan)
    group.change(0, 1, 2, 3, steps=(plan.step,))
    group.ingest("a", 640)
    before = len(group.tokens(suspected))
    while len(group.tokens(suspected)) == before:
        _drive(group, plans)
    assert "a" not in group.contexts()


def test_prompt_that_passes_the_failed_position_is_cleared() -> None:
    group = Group()
    requested = group.ask(200, max_tokens=2)
    _break_everywhere(group, requested)
    assert group.tokens(requested) == group.alone(200, 2)


def test_document_that_passes_the_failed_position_is_cleared() -> None:
    group = Group()
    _break_everywhere(group, group.ingest("a", 200))
    assert group.holds("a")


def _break_everywhere(group: Group, job: int) -> None:
    for place in (32, 64, 96, 128):
        plan = _until(group, job, place)
        group.change(0, 1, 2, 3, steps=(plan.step,))
    group.run()


def _until(group: Group, job: int, place: int) -> StepPlan:
    """The plan in flight of a job's chunk from a position on."""
    while True:
        plan = group.schedule()
        assert plan is not None and isinstance(plan.work, Prefill)
        if (job in group.scheduler._planner.under_way) and plan.work.start == place:
            return plan
        group.commit(plan)


def test_chunk_before_the_failed_position_clears_no_job() -> None:
    group = Group()
    requested = group.ask(100, max_tokens=2)
    while not isinstance(group.seen.get(requested, [None])[-1], Failed):
        plan = group.schedule()
        assert plan is not None
        if isinstance(plan.work, Prefill) and plan.work.start == 64:
            group.change(0, 1, 2, 3, steps=(plan.step,))
        else:
            group.commit(plan)
    reported = group.seen[requested][-1]
    assert isinstance(reported, Failed) and "tokens 64 to " in str(reported.error)
