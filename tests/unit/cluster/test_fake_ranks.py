"""Fake ranks save requested pieces and restore only fetched ones."""

import pytest

from longleaf.errors import DataLoss, RankLost, StorageUnavailable
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.snapshots import Fetch, Save
from longleaf.rank_protocol.step import Restore, RestorePortion, StepPlan
from longleaf.runs import Run
from tests.support.fakes.ranks import FakeRanks

RUN = Run(1, 0, 8, (3, 4))
WINDOW = Run(EVERY_RANK, 4, 8, (3,))


async def fetched(ranks: FakeRanks, member: int, ticket: int, name: str = "p", num_bytes: int = 8) -> None:
    await ranks.fetch(member, Fetch(ticket, name, num_bytes, name, ((0, num_bytes),)))


def restore(*runs: Run, ticket: int = 5) -> StepPlan:
    return StepPlan(1, 1, Restore(7, 0, (RestorePortion(ticket, runs),)))


async def test_saved_pieces_are_restored_by_the_member_that_fetched_them() -> None:
    ranks = FakeRanks(world_size=2)
    await ranks.start(1)
    saved = await ranks.save(1, Save(1, "p", 7, (RUN,)))
    assert (saved.member, saved.ticket, saved.num_bytes) == (1, 1, 8)
    with pytest.raises(AssertionError, match="does not hold the runs"):
        await ranks.save(0, Save(1, "p", 7, (RUN,)))
    await fetched(ranks, 1, 5)
    assert (await ranks.step(restore(Run(1, 4, 8, (9,))))).step == 1
    for plan in (restore(Run(0, 4, 8, (9,))), restore(RUN, ticket=6)):
        with pytest.raises(AssertionError, match="has fetched nothing under ticket"):
            await ranks.step(plan)
    with pytest.raises(AssertionError, match="has not fetched Run"):
        await ranks.step(restore(Run(1, 4, 9, (8, 9))))
    ranks.lose(0, "died")
    await ranks.form(2)
    await ranks.step(restore(Run(0, 4, 8, (9,))))
    await ranks.discard(1, [5])
    with pytest.raises(AssertionError, match="has fetched nothing"):
        await ranks.step(restore(Run(0, 4, 8, (9,))))


async def test_windows_are_fetched_by_all_members() -> None:
    ranks = FakeRanks(world_size=2)
    await ranks.start(1)
    await ranks.save(0, Save(1, "w", 7, (WINDOW,), of_windows=True))
    await fetched(ranks, 0, 5, "w", 4)
    plan = StepPlan(1, 1, Restore(7, 0, (), (WINDOW,), 5))
    with pytest.raises(AssertionError, match="member 1 has fetched nothing"):
        await ranks.step(plan)
    await fetched(ranks, 1, 5, "w", 4)
    await ranks.step(plan)


async def test_failures_of_storage_and_members_are_raised() -> None:
    ranks = FakeRanks(world_size=2)
    await ranks.start(1)
    await ranks.save(1, Save(1, "p", 7, (RUN,)))
    with pytest.raises(DataLoss):
        await fetched(ranks, 1, 5, "q")
    ranks.pieces["p"] -= {3}
    with pytest.raises(DataLoss):
        await fetched(ranks, 1, 5)
    ranks.storage_error = "full"
    with pytest.raises(StorageUnavailable, match="full"):
        await ranks.save(1, Save(1, "p", 7, (RUN,)))
    ranks.lose(1, "died")
    with pytest.raises(RankLost):
        await fetched(ranks, 1, 5)
