"""Faults in real processes under load with known answers: every guarantee must still be met."""

import time

import pytest

from tests.chaos.soak import MOST_SECONDS, Table, format_table, run_faults, settings_of, shuffled_faults

SHORT = ("kill rank 0 before the answer", "poison", "stop shortly", "kill the coordinator when it has kept")


READ = ("kill again while weights are read", "stop while weights are read", "kill the newcomer while joining")
"""Losses while others are healed, with room for the weights of one rank."""
WAIT = ("kill", "kill two", "kill the newcomer")
"""Losses without room: the group waits for the replacements."""


async def inject(seed: int, names: list[str]) -> None:
    table = Table()
    await run_faults(seed, names, table, time.monotonic() + MOST_SECONDS)
    print(format_table(table))


@pytest.mark.extended
@pytest.mark.timeout(400)
async def test_service_recovers_after_a_sample_of_faults():
    await inject(0, list(SHORT))


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("seed", "faults"), [(6, READ), (9, WAIT)], ids=["with room", "without room"])
async def test_service_with_sharded_weights_recovers_after_a_sample_of_losses(seed: int, faults: tuple[str, ...]):
    settings = settings_of(seed)
    assert (settings["weights"], settings.get("spare_ranks", 0)) == ("sharded", int(faults == READ))
    await inject(seed, list(faults))


@pytest.mark.slow
@pytest.mark.timeout(MOST_SECONDS + 240)
@pytest.mark.parametrize("seed", [1])
async def test_service_recovers_after_every_fault(seed: int):
    await inject(seed, shuffled_faults(seed))
