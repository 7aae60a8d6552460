"""Failure attribution when several members report errors at the same time. Member numbers differ from rank numbers."""

from collections.abc import Callable

import pytest

from coordinator.cluster.groups.failure_attribution import FailureCollector
from longleaf.errors import GroupFailed, RankLost

MEMBERS = (4, 7, 2)
"""Ranks 0, 1 and 2."""
Report = Callable[[FailureCollector], None]


def died(member: int) -> Report:
    return lambda losses: losses.record_exit(member, "was killed")


def failed(member: int, blamed: int | None = None) -> Report:
    return lambda losses: losses.record_failure(member, f"member {member} raised", blamed)


def broken(member: int, blamed: int | None = None) -> Report:
    return lambda losses: losses.record_group_failure(member, 5, f"member {member} raised", blamed)


class SimulatedCollector:
    """A failure collector whose members end as soon as they are killed."""

    def __init__(self, reports: list[Report], under_way: tuple[int, ...] = ()) -> None:
        self.killed: list[int] = []
        self.losses = FailureCollector(MEMBERS, self.kill, lambda: under_way)
        for report in reports:
            report(self.losses)

    def kill(self, member: int, reason: str) -> None:
        self.killed.append(member)
        self.losses.record_exit(member, reason)


@pytest.mark.parametrize(
    ("reports", "rank", "reason"),
    [
        ([failed(7), failed(4)], 1, "member 7 raised"),
        ([failed(4), failed(7), died(2)], 2, "was killed"),
        ([failed(4, blamed=2), failed(7, blamed=2), failed(2)], 2, "member 2 raised"),
        ([failed(4, blamed=2), died(2)], 2, "was killed"),
        ([broken(4), broken(7), died(2)], 2, "was killed"),
        ([broken(4, blamed=2), broken(7), failed(2)], 2, "member 2 raised"),
    ],
    ids=[
        "first report",
        "death without a word",
        "seen by others",
        "death seen by both",
        "others live",
        "its own word is waited for",
    ],
)
async def test_verdict_names_one_rank(reports: list[Report], rank: int, reason: str) -> None:
    simulated = SimulatedCollector(reports)
    loss = await simulated.losses.verdict
    assert isinstance(loss.error, RankLost)
    assert (loss.error.rank, loss.error.reason) == (rank, reason)
    assert simulated.killed == []


@pytest.mark.parametrize("before", [[], [broken(4)], [broken(4, blamed=1)]])
async def test_death_reported_by_the_launcher_needs_no_grace_period(before: list[Report]) -> None:
    simulated = SimulatedCollector([*before, died(2)])
    assert simulated.losses.verdict.done()
    assert str(simulated.losses.verdict.result().error) == "rank 2 was lost: was killed"


async def test_silent_member_blamed_by_its_peers_is_killed() -> None:
    simulated = SimulatedCollector([broken(4, blamed=2), broken(7, blamed=2)])
    loss = await simulated.losses.verdict
    assert simulated.killed == [2]
    assert loss.steps == (5,)
    assert str(loss.error) == "rank 2 was lost: member 4 raised"


@pytest.mark.parametrize(
    "reports", [[broken(7)], [broken(4, blamed=1), broken(7)], [broken(4, blamed=0)]], ids=["one", "its peer", "itself"]
)
async def test_member_that_raised_is_not_killed(reports: list[Report]) -> None:
    simulated = SimulatedCollector(reports)
    loss = await simulated.losses.verdict
    assert isinstance(loss.error, GroupFailed)
    assert (loss.steps, simulated.killed) == ((5,), [])


async def test_reports_of_other_epochs_are_ignored() -> None:
    simulated = SimulatedCollector([died(1), failed(0)])
    assert not simulated.losses.is_suspected
