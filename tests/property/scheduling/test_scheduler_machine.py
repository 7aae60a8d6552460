"""Any order of requests, steps and cancellations keeps the books straight, and all that is admitted ends."""

import pytest

from coordinator.engine_messages import SchedulingParams
from tests.support.scheduler_machine import SchedulerMachine, runs


class TestSchedulerMachine(SchedulerMachine.TestCase):
    settings = runs(40)


@pytest.mark.extended
class TestSchedulerMachineExtended(SchedulerMachine.TestCase):
    settings = runs(500)


def test_samples_of_a_running_prefill_overtake_no_job() -> None:
    machine = SchedulerMachine()
    machine.begin([4], 1, 1, 0, 2, 1, None, 0, "found")
    urgent = SchedulingParams(priority=2)
    machine.ask([0], 1, None, 1, SchedulingParams(), False)
    machine.ask([0], 1, None, 1, urgent, False)
    machine.schedule()
    machine._pause(1, True)
    machine.ask([0, 1], 1, None, 2, urgent, False)
    machine.schedule()
    machine._pause(1, False)
    machine.teardown()


@pytest.mark.slow
class TestSchedulerMachineAtLength(SchedulerMachine.TestCase):
    settings = runs(2000, is_random=True)
