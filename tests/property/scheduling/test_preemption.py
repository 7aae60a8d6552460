"""Preemption, computed for all waiting jobs at once, compared with a check of each pair."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from coordinator.engine_messages import DocumentPrompt, Prompt, SchedulingParams
from coordinator.kv_cache.block_placer import BlockCount
from coordinator.kv_cache.positions import UNLIMITED, RopeSwitch
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.scheduling.jobs import IngestJob, Job, Request, as_victims
from coordinator.scheduling.preemption import RunningSet
from coordinator.scheduling.prefill_cursor import PrefillCursor
from coordinator.scheduling.sequences import SequenceJob
from longleaf.positions import OWN_ROPE
from longleaf.sampling import SamplingParams


@st.composite
def jobs(draw: st.DrawFn, job_id: int) -> Job:
    """A job that runs, or waits."""
    scheduling = SchedulingParams(priority=draw(st.integers(-1, 2)), tenant=draw(st.sampled_from(["acme", "bolt"])))
    request = Request(job_id, scheduling, TokenPath(), RopeSwitch(OWN_ROPE, OWN_ROPE), UNLIMITED)
    request.is_paused = draw(st.booleans()) and draw(st.booleans())
    prefill = PrefillCursor(TokenPath(), array("I", [1]), 0)
    if draw(st.booleans()):
        job: Job = IngestJob(
            request, DocumentPrompt(context="doc", token_ids=[1], scheduling=scheduling), prefill, BlockCount()
        )
    else:
        prompt = Prompt(context=None, token_ids=(1,), sampling=SamplingParams(max_tokens=1), scheduling=scheduling)
        job = SequenceJob(request, prompt, prefill, BlockCount(), range(1))
    passed = frozenset(draw(st.lists(st.integers(0, 9), max_size=2)))
    job.record_start(passed, is_spared=draw(st.booleans()))
    return job


@given(st.integers(0, 4).flatmap(lambda count: st.tuples(*(jobs(i) for i in range(count)))), st.data())
def test_a_group_yields_if_one_member_does(running: tuple[Job, ...], data: st.DataObject) -> None:
    running_set = RunningSet(running)
    assert running_set.num_tails == sum(other.num_tails for other in running)
    assert running_set.sequences == [other for other in running if isinstance(other, SequenceJob)]
    for job_id in range(10):
        job = data.draw(jobs(job_id))
        assert running_set.may_yield_to(job) == any(job.may_preempt(other) for other in running_set.sequences)


@given(st.integers(0, 6).flatmap(lambda count: st.tuples(*(jobs(i) for i in range(count)))))
def test_no_priority_moves_the_turn_to_give_way_to_another_tenant(running: tuple[Job, ...]) -> None:
    order = as_victims(running)
    assert sorted(order, key=lambda job: job.id) == [*running]
    by_age = sorted(running, key=lambda job: (not job.request.is_paused, -job.id))
    assert [job.request.scheduling.tenant for job in order] == [job.request.scheduling.tenant for job in by_age]
    for tenant in ("acme", "bolt"):
        own = [job for job in order if job.request.scheduling.tenant == tenant]
        assert own == sorted(own, key=lambda job: job.rank_as_victim)
