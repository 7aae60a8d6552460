"""Ranks are lost, replaced and renumbered between any two events: no token is wrong, duplicate or missing, and all lost
keys are recovered.
"""

import pytest

from tests.support.recovering_machine import RecoveringMachine
from tests.support.scheduler_machine import runs


class TestLosses(RecoveringMachine.TestCase):
    settings = runs(40)


@pytest.mark.extended
class TestLossesExtended(RecoveringMachine.TestCase):
    settings = runs(500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestLossesAtLength(RecoveringMachine.TestCase):
    settings = runs(10_000, is_random=True)
