"""Contexts are evicted and called, and the service dies and starts again over what was kept, between any two events;
some of it comes back from storage."""

from typing import Any

import pytest

from coordinator.engine_messages import DEFAULT_SCHEDULING, SchedulingParams
from longleaf.positions import AttentionSpan, WindowSpec
from tests.support.durable_machine import DurableMachine
from tests.support.scheduler_machine import runs
from tests.support.snapshot_machine import SnapshotMachine


class TestDurability(DurableMachine.TestCase):
    settings = runs(40)


class TestSnapshots(SnapshotMachine.TestCase):
    settings = runs(15)


@pytest.mark.extended
class TestDurabilityExtended(DurableMachine.TestCase):
    settings = runs(400)


@pytest.mark.extended
class TestSnapshotsExtended(SnapshotMachine.TestCase):
    settings = runs(200)


class Drawn:
    """Gives what Hypothesis drew once."""

    def __init__(self, *values: object) -> None:
        self._values = list(values)

    def draw(self, *_: object, **__: object) -> Any:
        return self._values.pop(0)


def test_who_waits_for_the_room_of_a_context_that_is_being_appended_to_begins_later() -> None:
    """It may not rest before the request is admitted; that is no reason to think that nobody will ever begin."""
    machine, schedulings = DurableMachine(), [SchedulingParams(), SchedulingParams()]
    machine.begin([4], 1, 2, 3, 1, 1, None, 0, "found")
    machine.lose_and_form(data=Drawn(0, [], 2, set[int](), 1, 2))
    machine.ask_and_not_read(schedulings)
    machine.cancel(data=Drawn(0))
    machine.append_little_by_little("a", [1] * 4, SchedulingParams())
    machine.ask_and_not_read(schedulings)
    machine.ask_and_not_read(schedulings)
    machine.pause(data=Drawn(6), is_paused=False)
    machine.lose_and_form(data=Drawn(0, [], 2, {0}, 0, 0, [1]))
    machine.ask_and_not_read(schedulings)
    machine.ask([0, 1, 2, 3], 1, None, 1, SchedulingParams(), False)
    machine.append_little_by_little("a", [1] * 5, SchedulingParams())
    machine.teardown()


def test_a_reserve_that_eviction_makes_small_enough_is_made_in_the_same_turn() -> None:
    """A long context cannot be recomputed beside the windows of two short segments; once the context is evicted, there
    is enough room to recompute the segments, and no later event makes the scheduler try again."""
    machine, windows = DurableMachine(), WindowSpec(reaches=(AttentionSpan(4),), num_blocks=8)
    machine.begin([17], 20, 3, 0, 1, 1, windows, 0, "found")
    machine.append_little_by_little("b", [3, 1, 3], SchedulingParams())
    machine.join(data=Drawn(0, [], 2))
    machine.ingest(list(range(2, 39)), "a", False, SchedulingParams())
    machine.lose_one_amid_steps(data=Drawn(0, [], 1, 1), steps=5)
    machine.append_little_by_little("b", [1, 3, 3], SchedulingParams())
    machine.teardown()


def test_a_question_about_a_deleted_context_holds_its_room_while_it_waits() -> None:
    """The long prompt waits for a question that overtook it, and then for one that still waits: both hold the deleted
    context, so preempting the first would not make room."""
    machine = DurableMachine()
    machine.begin([15], 32, 4, 0, 1, 4, None, 0, "found")
    machine.ingest(list(range(20)), "a", False, DEFAULT_SCHEDULING)
    machine.run_steps(3, 1, 0.001)
    machine.ask([0], 2, None, 1, DEFAULT_SCHEDULING, False)
    machine.run_steps(1, 1, 0.001)
    machine.ask(list(range(100, 140)), 8, None, 1, DEFAULT_SCHEDULING, False)
    machine.ask([0], 2, "a", 1, DEFAULT_SCHEDULING, False)
    machine.ask([0], 2, "a", 1, DEFAULT_SCHEDULING, False)
    machine.delete("a")
    machine.run_steps(2, 1, 0.001)
    [running], (long, last) = machine.scheduler._running.values(), machine.scheduler._queue.order()
    assert long.id in running.passed
    assert machine._is_kept_out(long)
    assert not machine._is_kept_out(last)
    machine.teardown()


def test_a_long_prompt_preempts_a_prompt_that_shares_the_keys_of_an_idle_context() -> None:
    """The long prompt needs the blocks that the prompt and the context share. Neither the preemption nor the eviction
    frees them without the other."""
    machine = DurableMachine()
    machine.begin([10], 8, 4, 0, 2, 4, None, 0, "found")
    machine.ingest(list(range(12)), "a", False, DEFAULT_SCHEDULING)
    machine.run_steps(4, 1, 0.001)
    machine.ask([50], 4, None, 1, DEFAULT_SCHEDULING, False)
    machine.run_steps(1, 1, 0.001)
    machine.ask(list(range(100, 136)), 1, None, 1, DEFAULT_SCHEDULING, False)
    machine.ask(list(range(16)), 12, None, 1, DEFAULT_SCHEDULING, False)
    machine.run_steps(1, 1, 0.001)
    (_, sharing), (long,) = machine.scheduler._running.values(), machine.scheduler._queue
    assert long.id in sharing.passed
    assert sharing.prefill.path.segments[0] in machine.scheduler.contexts.get("a").path.segments
    machine.run_steps(4, 1, 0.001)
    assert long.is_running
    machine.teardown()


def test_contexts_that_have_no_room_together_while_they_are_reloaded_are_reloaded_one_by_one() -> None:
    """Both are evicted for a long prompt. Each fits beside the other, but recomputation takes two more states."""
    machine, windows = DurableMachine(), WindowSpec(reaches=(AttentionSpan(2),), num_blocks=4, is_state=True)
    machine.begin([25], 20, 2, 8, 1, 4, windows, 0, "wrong")
    machine.ask_constantly(size=1, percent=22, questions=[("a", 4), ("c", 1)], steps=1)
    assert all(job.is_deferred for job in machine.scheduler._queue if job.context)
    machine.teardown()


def test_a_refused_question_does_not_end_the_turn_of_the_oldest_job() -> None:
    """The context of the refused question needs window blocks for recomputation until it is evicted again."""
    spans = (AttentionSpan(section=8), AttentionSpan(2), AttentionSpan(5))
    machine, windows = DurableMachine(), WindowSpec(reaches=spans, num_blocks=9)
    machine.begin([20], 20, 5, 0, 3, 3, windows, 2, "right")
    machine.ask_constantly(size=31, percent=13, questions=[("c", 2), ("b", 2), ("a", 1)], steps=0)
    assert machine.turn is not None
    machine.teardown()


def test_a_job_that_is_recomputed_for_longer_positions_has_another_turn() -> None:
    """It began in its turn for age. The question that overtakes it later runs when it is the oldest again."""
    machine = DurableMachine()
    machine.begin([10], 20, 4, 0, 1, 4, None, 0, "anything", scaled_from=24)
    machine.ask_constantly(size=5, percent=68, questions=[("b", 3), ("a", 4), ("b", 2), ("c", 4)], steps=1)
    machine.ask_constantly(size=0, percent=0, questions=[], steps=1)
    machine.teardown()


def test_an_answer_that_is_not_read_yields_to_the_reload_of_a_context() -> None:
    machine = DurableMachine()
    machine.begin([13], 20, 3, 0, 1, 2, None, 0, "wrong")
    machine.ingest(list(range(15)), "a", False, DEFAULT_SCHEDULING)
    machine.run_steps(4, 2, 0.001)
    machine.rest("a")
    machine.ask(list(range(100, 125)), 6, None, 1, DEFAULT_SCHEDULING, False)
    machine.run_steps(1, 1, 0.001)
    [unread] = machine.scheduler._running
    machine.ask([0], 2, "a", 1, DEFAULT_SCHEDULING, False)
    machine._pause(unread, True)
    machine.run_steps(12, 2, 0.001)
    assert machine.open.keys() == {unread}
    machine.teardown()


@pytest.mark.parametrize("num_tokens", [9, 8], ids=["of whole blocks", "that ends within a block"])
def test_a_document_with_the_id_that_a_prompt_had_before_the_end_does_not_come_back_as_that_prompt(
    num_tokens: int,
) -> None:
    machine = SnapshotMachine()
    machine.begin([8], 8, 4, 0, 3, 1, None, 0, "found")
    machine.ask(list(range(100, 100 + num_tokens)), 2, None, 1, DEFAULT_SCHEDULING, False)
    machine.save_and_die(data=Drawn([10, 4]), steps=9)
    machine.lose_one_amid_a_document(data=Drawn(0, [], 2, 1), context="a", count=34, steps=1, question=0)
    machine.teardown()


def test_a_document_does_not_come_back_as_one_that_was_deleted_before_the_end() -> None:
    machine = SnapshotMachine()
    machine.begin([10, 8], 8, 4, 0, 3, 1, None, 0, "found")
    machine.ingest(list(range(100, 134)), "a", False, DEFAULT_SCHEDULING)
    machine.run_steps(12, 2, 0.001)
    machine.save(data=Drawn(machine.scheduler.segments.placements.find(0)), size=2)
    machine.delete("a")
    machine.die(data=Drawn([10, 8]))
    machine.ingest(list(range(34)), "b", False, DEFAULT_SCHEDULING)
    machine.run_steps(12, 2, 0.001)
    machine.rest_and_ask("b", 1, 3)
    machine.books_are_equal()
    machine.teardown()


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestDurabilityAtLength(DurableMachine.TestCase):
    settings = runs(10_000, is_random=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestSnapshotsAtLength(SnapshotMachine.TestCase):
    settings = runs(10_000, is_random=True)
