"""Contexts are parked and called, and the service dies and starts again over what was kept, between any two events."""

import pytest

from tests.support.durable_machine import DurableMachine
from tests.support.scheduler_machine import runs


class TestDurability(DurableMachine.TestCase):
    settings = runs(300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestDurabilityAtLength(DurableMachine.TestCase):
    settings = runs(10_000)
