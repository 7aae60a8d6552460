"""Faults by name. Each is injected once under load, and the service must recover completely afterwards."""

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import NamedTuple

import psutil

from longleaf.config import EngineConfig
from longleaf.errors import Unavailable
from tests.chaos.load import Load, ask_poison
from tests.chaos.points import (
    AFTER_KEEP,
    ANSWER,
    BEFORE_KEEP,
    BROADCAST,
    CALL,
    CHUNK,
    COMMIT,
    DELETE,
    EVICT,
    FETCH,
    JOINING,
    LAYOUT,
    MANIFEST,
    MOVE,
    NOTE,
    PUBLISH,
    READ,
    RECORDED,
    RESTORE,
    SAVE,
    SAVED,
    STEP,
    TENSOR,
    WRITTEN,
    Fault,
)
from tests.chaos.reference import DEADLY, FILLER, POISON, VISITOR
from tests.chaos.service import Service
from tests.chaos.snapshots import Harm, cut_pieces, flip_bits, folder_of, lose_all, lose_files

SHORT_SECONDS = 1.0
"""Duration of a stop that is too short for the rank to be declared lost."""
GONE_SECONDS = 120.0
AMID_READING = 6
"""The number of the tensor at which a fault amid reading fires."""
LOOK_SECONDS = 0.05
MOST_DELAY = 2.0
"""Maximum seconds between two consecutive losses."""


class Outcome(NamedTuple):
    """Expected effects of a fault: processes that must be gone, and the minimum number of new epochs."""

    gone: frozenset[int] = frozenset()
    num_epochs: int = 0


class Scene(NamedTuple):
    """Target of a fault. `pids` are those of the ranks."""

    service: Service
    pids: list[int]
    random: Random
    load: Load | None = None
    """Running clients."""

    def num_epochs(self, num_lost: int) -> int:
        """Minimum number of new epochs after the loss of ranks: one of the others, unless they have no room for all
        weights and wait for replacements, and one with the replacements."""
        return num_epochs(self.service.config, num_lost)

    @property
    def turn(self) -> int:
        """A fault fires when its point is reached for this (random) time."""
        return self.random.randint(1, 6)


def num_epochs(config: EngineConfig, num_lost: int) -> int:
    """As `Scene.num_epochs`."""
    return 1 if config.has_shares and num_lost > config.spare_ranks else 2


Do = Callable[[Scene], Awaitable[Outcome]]


async def kill(scene: Scene, count: int | None = None, *, is_first: bool = False) -> Outcome:
    """Kills ranks at once, all of them by default, including rank 0 if `is_first`."""
    count = len(scene.pids) if count is None else count
    victims = scene.pids[:count] if is_first else scene.random.sample(scene.pids, count)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    return Outcome(frozenset(victims), scene.num_epochs(count))


async def kill_later(scene: Scene) -> Outcome:
    """Kills a second rank after a random delay, during the recovery of the first."""
    first, second = scene.random.sample(scene.pids, 2)
    os.kill(first, signal.SIGKILL)
    await asyncio.sleep(scene.random.uniform(0.0, MOST_DELAY))
    os.kill(second, signal.SIGKILL)
    return Outcome(frozenset((first, second)), scene.num_epochs(2))


async def kill_newcomer(scene: Scene, point: str = "") -> Outcome:
    """Kills a rank, and its replacement at a point, or after a random delay before it has joined."""
    lost = scene.random.choice(scene.pids)
    before = scene.service.rank_processes()
    os.kill(lost, signal.SIGKILL)
    async with asyncio.timeout(GONE_SECONDS):
        while not (new := scene.service.rank_processes() - before):  # noqa: ASYNC110, processes send no notification
            await asyncio.sleep(LOOK_SECONDS / 10)
        [pid] = new
        if point:
            await scene.service.wait_probe(pid)
            scene.service.arm(pid, Fault(point, "kill"))
        else:
            await asyncio.sleep(scene.random.uniform(0.0, MOST_DELAY))
            os.kill(pid, signal.SIGKILL)
    return Outcome(frozenset((lost, pid)), scene.num_epochs(1))


async def inject(scene: Scene, point: str, act: str, *, is_first: bool = False) -> Outcome:
    """Arms a permanent fault at a point of a random rank, or of rank 0 if `is_first`."""
    pid = scene.pids[0] if is_first else scene.random.choice(scene.pids)
    scene.service.arm(pid, Fault(point, act, scene.turn))
    return Outcome(frozenset((pid,)), scene.num_epochs(1))


async def inject_during_recovery(scene: Scene, point: str, act: str = "kill", turn: int = 1) -> Outcome:
    """Kills a rank, and injects a permanent fault into another one when it reaches a point during the recovery for the
    given time."""
    first, second = scene.random.sample(scene.pids, 2)
    scene.service.arm(second, Fault(point, act, turn))
    os.kill(first, signal.SIGKILL)
    return Outcome(frozenset((first, second)), scene.num_epochs(2))


async def kill_at_coordinator_point(scene: Scene, point: str) -> Outcome:
    """Kills a rank when the coordinator reaches a point."""
    pid = scene.random.choice(scene.pids)
    scene.service.arm_coordinator(Fault(point, "kill", scene.turn, pid))
    return Outcome(frozenset((pid,)), scene.num_epochs(1))


async def fail(scene: Scene) -> Outcome:
    """A rank raises an error and stays alive."""
    scene.service.arm(scene.random.choice(scene.pids), Fault(STEP, "fail", scene.turn))
    return Outcome(num_epochs=1)


async def exhaust(scene: Scene) -> Outcome:
    """Limits the address space of a rank to its current size."""
    pid = scene.random.choice(scene.pids)
    resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms,) * 2)
    scene.service.arm(pid, Fault(STEP, "allocate", scene.turn))
    return Outcome(num_epochs=1)


async def stop(scene: Scene, seconds: float | None) -> Outcome:
    """Stops a rank permanently, or for `seconds`, which are too short for it to be declared lost."""
    pid = scene.random.choice(scene.pids)
    os.kill(pid, signal.SIGSTOP)
    if seconds is None:
        return Outcome(frozenset((pid,)), scene.num_epochs(1))
    await asyncio.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
    return Outcome()


async def evict_under_load(scene: Scene, point: str, *, by_coordinator: bool = False) -> Outcome:
    """Kills a rank when it or the coordinator reaches a point, while new contexts cause constant evictions and
    restores."""
    pid = scene.random.choice(scene.pids)
    if by_coordinator:
        scene.service.arm_coordinator(Fault(point, "kill", scene.random.randint(1, 3), pid))
    else:
        scene.service.arm(pid, Fault(point, "kill", scene.random.randint(1, 3)))
    async with scene.service.evicting():
        await wait_gone(pid)
    return Outcome(frozenset((pid,)), scene.num_epochs(1))


async def wait_gone(pid: int) -> None:
    async with asyncio.timeout(GONE_SECONDS):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)


async def remove_storage(scene: Scene) -> Outcome:
    """Kills a rank while its storage folder is missing; the folder returns later."""
    folder, pid = folder_of(scene.service.data), scene.random.choice(scene.pids)
    away = folder.with_name("away")
    folder.rename(away)
    try:
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(scene.random.uniform(0.0, MOST_DELAY))
    finally:
        away.rename(folder)
    return Outcome(frozenset((pid,)), scene.num_epochs(1))


async def restart_service(
    scene: Scene, point: str = "", *, crowds: bool = False, harm: Harm | None = None, again: str = ""
) -> Outcome:
    """Kills all processes at once, or the coordinator at a point, and starts another service with the same data folder.
    Acknowledged contexts must exist, deleted ones must not, and all answers must be unchanged.

    With `crowds`, contexts are evicted meanwhile. `harm` damages the storage before the next service starts; a rank of
    that service is killed when it reaches the point `again`.
    """
    service, load = scene.service, scene.load
    assert load is not None
    load.may_lose_service = True
    service.record_processes()
    if point:
        service.arm_coordinator(Fault(point, "kill", scene.random.randint(1, 2)))
        if crowds:
            with suppress(Unavailable):
                async with service.evicting():
                    await asyncio.to_thread(service.process.wait, GONE_SECONDS)
    else:
        await asyncio.sleep(scene.random.uniform(0.0, MOST_DELAY))
        service.record_processes()
        service.kill_processes()
    await load.wait_broken()
    if harm is not None:
        harm(folder_of(service.data), scene.random)
    await service.restart()
    found = {context.id for context in await service.client.list_contexts()}
    retained = {known.context for known in service.reference.known if known.context != VISITOR}
    missing, wrong = (retained | load.made) - load.unsure - found, found - retained - load.made - load.unsure
    wrong = {name for name in wrong if not name.startswith(FILLER)}
    assert not missing, f"acknowledged but missing: {missing}"
    assert not wrong, f"deleted or never created: {wrong}"
    for name in found - retained:
        await service.client.delete_context(name)
    gone = set(scene.pids)
    if again:
        pid = scene.random.choice(await service.pids())
        service.arm(pid, Fault(again, "kill"))
        gone.add(pid)
    await service.load_contexts()
    return Outcome(frozenset(gone), 1)


async def poison(scene: Scene, poison: tuple[int, ...], num_epochs: int) -> Outcome:
    await ask_poison(scene.service.client, poison)
    return Outcome(num_epochs=num_epochs)


FAULTS: dict[str, Do] = {
    "kill": partial(kill, count=1),
    "kill rank 0": partial(kill, count=1, is_first=True),
    "kill two": partial(kill, count=2),
    "kill all": kill,
    "kill later": kill_later,
    "kill before a step": partial(inject, point=STEP, act="kill"),
    "kill at half of a run": partial(inject, point=CHUNK, act="kill"),
    "kill rank 0 before broadcast": partial(inject, point=BROADCAST, act="kill", is_first=True),
    "kill before broadcast": partial(inject, point=BROADCAST, act="kill"),
    "kill rank 0 before the answer": partial(inject, point=ANSWER, act="kill", is_first=True),
    "kill after the step": partial(inject, point=ANSWER, act="kill"),
    "kill after commit": partial(kill_at_coordinator_point, point=COMMIT),
    "kill before publishing": partial(kill_at_coordinator_point, point=PUBLISH),
    "kill again while joining": partial(inject_during_recovery, point=JOINING),
    "kill again before the layout": partial(inject_during_recovery, point=LAYOUT),
    "kill again at half of a run": partial(inject_during_recovery, point=CHUNK),
    "kill again in a move": partial(inject_during_recovery, point=MOVE),
    "kill again before weights are read": partial(inject_during_recovery, point=READ),
    "stop before weights are read": partial(inject_during_recovery, point=READ, act="stop"),
    "kill again while weights are read": partial(inject_during_recovery, point=TENSOR, turn=AMID_READING),
    "stop while weights are read": partial(inject_during_recovery, point=TENSOR, act="stop", turn=AMID_READING),
    "kill the newcomer": kill_newcomer,
    "kill the newcomer while joining": partial(kill_newcomer, point=JOINING),
    "fail": fail,
    "poison": partial(poison, poison=POISON, num_epochs=2),
    "deadly poison": partial(poison, poison=DEADLY, num_epochs=4),
    "spin": partial(inject, point=STEP, act="spin"),
    "sleep": partial(inject, point=STEP, act="sleep"),
    "hold": partial(inject, point=STEP, act="hold"),
    "stop": partial(stop, seconds=None),
    "stop shortly": partial(stop, seconds=SHORT_SECONDS),
    "no memory": exhaust,
    "kill everything": restart_service,
    "kill the coordinator before it keeps": partial(restart_service, point=BEFORE_KEEP),
    "kill the coordinator when it has kept": partial(restart_service, point=AFTER_KEEP),
    "kill the coordinator after commit": partial(restart_service, point=COMMIT),
    "kill before a piece is written": partial(inject, point=SAVE, act="kill"),
    "kill when a piece is written": partial(inject, point=SAVED, act="kill"),
    "kill before a piece is read": partial(evict_under_load, point=FETCH),
    "kill before a fetched piece is restored": partial(evict_under_load, point=RESTORE),
    "kill when a segment is evicted": partial(evict_under_load, point=EVICT, by_coordinator=True),
    "kill when an evicted segment is needed": partial(evict_under_load, point=CALL, by_coordinator=True),
    "kill while a manifest is written": partial(kill_at_coordinator_point, point=MANIFEST),
    "take storage away": remove_storage,
    "kill the coordinator before a manifest": partial(restart_service, point=MANIFEST),
    "kill the coordinator after a manifest": partial(restart_service, point=WRITTEN),
    "kill the coordinator after a snapshot": partial(restart_service, point=RECORDED),
    "kill the coordinator before a note": partial(restart_service, point=NOTE),
    "kill the coordinator before it deletes": partial(restart_service, point=DELETE),
    "kill the coordinator as it evicts": partial(restart_service, point=EVICT, crowds=True),
    "kill the coordinator as it calls": partial(restart_service, point=CALL, crowds=True),
    "kill everything, and a reader": partial(restart_service, again=FETCH),
    "kill everything, and a holder": partial(restart_service, again=RESTORE),
    "kill everything, and cut pieces": partial(restart_service, harm=cut_pieces),
    "kill everything, and flip bits": partial(restart_service, harm=flip_bits),
    "kill everything, and lose files": partial(restart_service, harm=lose_files),
    "kill everything, and lose storage": partial(restart_service, harm=lose_all),
}
READING = tuple(f"{act} {when} weights are read" for act in ("kill again", "stop") for when in ("before", "while"))
"""Faults that need room for the weights of a lost rank: otherwise the remaining ranks read nothing."""
NO_LOSS = ("stop shortly",)
"""Faults that must not start a new epoch."""
