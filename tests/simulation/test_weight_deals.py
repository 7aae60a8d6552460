"""Members are lost, leave and join in any order, even while others read or a group forms: a group has each part of the
weights once, no member exceeds its room, and survivors of a loss read little.
"""

import asyncio

import pytest

from tests.support.weight_schedules import WeightSchedule


async def run(seeds: range) -> None:
    for seed in seeds:
        try:
            await WeightSchedule(seed).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_schedules() -> None:
    asyncio.run(run(range(200)))


@pytest.mark.extended
@pytest.mark.timeout(3600)
def test_schedules_extended() -> None:
    asyncio.run(run(range(200, 10_200)))
