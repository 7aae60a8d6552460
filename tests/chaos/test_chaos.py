"""Faults in real processes under load with known answers: every guarantee must still be met."""

import time

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.soak import MOST_SECONDS, Table, format_table, run_faults, shuffled_faults

SHORT = ("kill rank 0 before the answer", "poison", "stop shortly", "kill the coordinator when it has kept")


async def inject(seed: int, names: list[str]) -> None:
    table = Table()
    await run_faults(seed, names, table, time.monotonic() + MOST_SECONDS)
    print(format_table(table))


@pytest.mark.extended
@pytest.mark.timeout(400)
async def test_service_recovers_after_a_sample_of_faults():
    await inject(0, list(SHORT))


@pytest.mark.slow
@pytest.mark.timeout(MOST_SECONDS + 240)
@pytest.mark.parametrize("seed", [1])
async def test_service_recovers_after_every_fault(seed: int):
    await inject(seed, shuffled_faults(seed, FAULTS))
