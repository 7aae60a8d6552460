"""Who is to blame when several ranks report trouble at once."""

import asyncio
from collections.abc import Callable

import pytest

from coordinator.ranks.blame import Losses
from longleaf.errors import WorkerLost

Report = Callable[[Losses], None]


def died(rank: int) -> Report:
    return lambda losses: losses.died(rank, "was killed")


def raised(rank: int, blamed: int | None = None) -> Report:
    return lambda losses: losses.failed(rank, f"rank {rank} raised", blamed)


@pytest.mark.parametrize(
    ("reports", "rank", "reason"),
    [
        ([raised(1), raised(0)], 1, "rank 1 raised"),
        ([raised(0), died(0), raised(1), died(2)], 2, "was killed"),
        ([raised(0, blamed=2), raised(1, blamed=2)], 2, "rank 0 raised"),
        ([raised(0, blamed=2), raised(2), died(2)], 2, "rank 2 raised"),
        ([raised(0, blamed=2), died(2)], 2, "was killed"),
    ],
    ids=["first report", "death without a word", "seen by others", "its own word counts more", "death seen by both"],
)
async def test_the_verdict_names_one_rank(reports: list[Report], rank: int, reason: str) -> None:
    losses = Losses(asyncio.get_running_loop())
    for report in reports:
        report(losses)
    verdict = await losses.verdict
    assert isinstance(verdict, WorkerLost)
    assert (verdict.rank, verdict.reason) == (rank, reason)
