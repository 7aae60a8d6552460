"""Rank losses during answers: streams continue, the loss is reported, and the rank is replaced."""

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command_line import Served
from tests.support.witness import Witness

pytestmark = pytest.mark.timeout(300)
RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.extended])
BOTH = ["local", RAY]
LAUNCHERS = ["local", RAY]


class RecoveryRun:
    """A service of `world_size` ranks that is queried and watched while ranks are lost."""

    def __init__(self, started: ExitStack, checkpoint: Path, launcher: str, world_size: int, *options: str) -> None:
        own = ("--model", str(checkpoint), "--world-size", str(world_size), "--launcher", launcher)
        self.service = started.enter_context(Served(*own, "--kv-bytes", "8000000", *options))
        self.observer = started.enter_context(Witness(self.service.address))
        self.world_size = world_size
        self.pids = self.service.rank_pids()
        self.num_losses = 0

    def kill_ranks(self, number: signal.Signals, *ranks: int) -> list[psutil.Process]:
        """Sends a signal to ranks during an answer."""
        self.observer.under_way()
        lost = [psutil.Process(self.pids[rank]) for rank in ranks]
        for process in lost:
            process.send_signal(number)
        self.num_losses += len(ranks)
        return lost

    def wait_recovered(self, *lost: psutil.Process) -> list[dict[str, Any]]:
        """Waits until the world is complete without these processes; returns the losses so far."""
        found = self.observer.healed(self.world_size, self.num_losses)
        assert len(found["losses"]) == self.num_losses
        nodes = {worker["node"] for worker in found["workers"]}
        assert all(loss["reason"] and loss["node"] in nodes for loss in found["losses"])
        self.pids = [worker["pid"] for worker in found["workers"]]
        assert psutil.wait_procs(lost, timeout=20)[1] == []
        return found["losses"]

    def end(self) -> None:
        """Checks the results, and that no process remains."""
        self.observer.under_way()
        self.observer.check()
        found = self.service.json("cluster")
        assert len(found["losses"]) == self.num_losses
        assert self.service.stop() == 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_lost_rank_is_replaced(checkpoint: Path, started: ExitStack, launcher: str):
    job_recovery = RecoveryRun(started, checkpoint, launcher, 2)
    for turn, rank in enumerate((1, 0), start=1):
        losses = job_recovery.wait_recovered(*job_recovery.kill_ranks(signal.SIGKILL, rank))
        assert [loss["rank"] for loss in losses[turn - 1 :]] == [rank]
    job_recovery.end()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", BOTH)
def test_several_ranks_lost_at_once_and_consecutively_are_replaced(checkpoint: Path, started: ExitStack, launcher: str):
    job_recovery = RecoveryRun(started, checkpoint, launcher, 3)
    job_recovery.wait_recovered(*job_recovery.kill_ranks(signal.SIGKILL, 0, 1, 2))
    lost = job_recovery.kill_ranks(signal.SIGKILL, 2)
    found = job_recovery.observer.cluster(lambda found: found["world_size"] == 2)
    job_recovery.pids = [worker["pid"] for worker in found["workers"]]
    job_recovery.wait_recovered(*lost, *job_recovery.kill_ranks(signal.SIGKILL, 0))
    job_recovery.end()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", BOTH)
def test_stopped_rank_is_killed_after_the_timeout(checkpoint: Path, started: ExitStack, launcher: str):
    job_recovery = RecoveryRun(started, checkpoint, launcher, 2, "--lost-after", "2")
    for turn, rank in enumerate((0, 1), start=1):
        losses = job_recovery.wait_recovered(*job_recovery.kill_ranks(signal.SIGSTOP, rank))
        [(reported, reason)] = [(loss["rank"], loss["reason"]) for loss in losses[turn - 1 :]]
        assert (reported, reason) == (rank, "no heartbeat for 2 s")
    job_recovery.end()


@pytest.mark.slow
def test_rank_that_hangs_past_a_deadline_is_killed(checkpoint: Path, started: ExitStack):
    job_recovery = RecoveryRun(started, checkpoint, "local", 2, "--step-timeout", "3", "--lost-after", "60")
    [loss] = job_recovery.wait_recovered(*job_recovery.kill_ranks(signal.SIGSTOP, 1))
    assert loss["rank"] == 1 and "exceeded its limit of 3" in loss["reason"]
    job_recovery.end()
