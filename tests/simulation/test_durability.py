"""Contexts are parked and called, and the service dies and starts again over what was kept, between any two events;
some of it comes back from storage."""

import pytest

from tests.support.durable_machine import DurableMachine
from tests.support.scheduler_machine import runs
from tests.support.snapshot_machine import SnapshotMachine


class TestDurability(DurableMachine.TestCase):
    settings = runs(200)


class TestSnapshots(SnapshotMachine.TestCase):
    settings = runs(60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestDurabilityAtLength(DurableMachine.TestCase):
    settings = runs(10_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestSnapshotsAtLength(SnapshotMachine.TestCase):
    settings = runs(10_000)
