"""Many consecutive losses and epochs accumulate neither errors nor resources."""

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.chaos.endurance import Size, check_growth, size_of
from tests.chaos.faults import Outcome, Scene, fail, kill
from tests.chaos.load import answer, check
from tests.chaos.reference import LONG, make_reference
from tests.chaos.service import Service

pytestmark = pytest.mark.timeout(2400)
LOSSES, EPOCHS, WARM_UP = 50, 100, 10
KV_BYTES = 8 << 20
"""Small compared to the memory of a rank: the pool grows while its blocks are first used."""


async def kill_another(scene: Scene, spared: int) -> Outcome:
    """Kills a random rank other than the process `spared`."""
    others = [pid for pid in scene.pids if pid != spared]
    return await kill(scene._replace(pids=others), 1)


async def inject_faults(service: Service, turns: int, spared: int | None, random: Random) -> list[dict[int, Size]]:
    """Injects consecutive faults under a stream, which must complete each time: a loss of a process other than
    `spared`, or an exception in a rank if `spared` is None. Returns the resource usage of each process after each
    fault."""
    sizes = list[dict[int, Size]]()
    known = [one for one in service.reference.asks(LONG) if not one.options]
    for turn in range(turns):
        epoch, pids = (await service.client.cluster()).epoch, await service.pids()
        requested = known[turn % len(known)]
        stream = asyncio.create_task(answer(service.client, requested, Counter()))
        scene = Scene(service, pids, random)
        outcome = await (fail(scene) if spared is None else kill_another(scene, spared))
        await service.wait_healed(set(outcome.gone), epoch + outcome.num_epochs)
        check(await stream, requested)
        sizes.append({pid: size_of(pid) for pid in (service.process.pid, *await service.pids())})
    return sizes


@pytest.mark.slow
async def test_service_stays_within_tolerance_after_fifty_consecutive_losses(tmp_path: Path):
    """Includes memory: the spared rank takes part in all epochs."""
    reference = make_reference(tmp_path / "model", "llama", 1)
    async with Service(tmp_path, reference, kv_bytes=KV_BYTES) as service:
        await service.prepare()
        spared = (await service.pids())[1]
        sizes = await inject_faults(service, LOSSES, spared, Random(1))
        assert spared in sizes[-1]
        check_growth(sizes, WARM_UP // 2)
        await service.check()
        await service.stop()


@pytest.mark.slow
async def test_hundred_epochs_leak_no_resources(tmp_path: Path):
    """No process is lost: a rank raises, and all ranks rejoin."""
    reference = make_reference(tmp_path / "model", "gemma3", 2)
    async with Service(tmp_path, reference, kv_bytes=KV_BYTES) as service:
        await service.prepare()
        sizes = await inject_faults(service, EPOCHS, None, Random(2))
        assert len(set(sizes[0]) & set(sizes[-1])) == 4
        check_growth(sizes, WARM_UP)
        await service.check()
        await service.stop()
