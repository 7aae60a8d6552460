"""Hurts services in every way that is known, under load with known answers, and checks all that they promise.

    python -m tests.chaos.soak --minutes 30
    python -m tests.chaos.soak --seed 17 --only "kill two" "poison"

A run is a service of one seed, which deals the faults and chooses everything in them; it is whole again before the next
fault comes. Without a seed it is a fresh one, run after run until the time is over; with one it is that run alone.
"""

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.faults import FAULTS, NO_LOSS, Scene
from tests.chaos.load import Load
from tests.chaos.reference import make_reference
from tests.chaos.service import Service

FAMILIES = ("llama", "gemma3", "deepseek_v3")
"""Full reach, windows, and latents."""
MOST_SECONDS = 600.0
"""Of a run: no fault is begun later."""


@dataclass
class Row:
    """What became of one fault, over all times that it was met."""

    times: int = 0
    seconds: float = 0.0
    """Until the service was whole, all in all."""
    epochs: int = 0
    keys: float = 0.0
    """Largest difference of a key, as a share of the largest one."""
    logits: float = 0.0
    """Largest difference of a logprob, as a share of what is allowed."""
    told: Counter[str] = field(default_factory=Counter[str])


Table = dict[str, Row]


def show(table: Table) -> str:
    """For people."""
    head = f"{'fault':38} times  s/heal epochs streams  left ingests waits  keys off logprobs"
    lines = [
        f"{name:38} {row.times:5} {row.seconds / max(1, row.times):7.1f} {row.epochs:6} {row.told['streams']:7}"
        f" {row.told['left']:5} {row.told['ingests']:7} {row.told['waits']:5}"
        f" {row.keys:9.1e} {row.logits:8.0%}"
        for name, row in table.items()
    ]
    return "\n".join([head, *lines])


def deal(seed: int, among: Iterable[str] = FAULTS) -> list[str]:
    """Every fault once, in an order of the seed's."""
    names = list(among)
    random.Random(seed).shuffle(names)
    return names


def line(seed: int, names: Sequence[str]) -> str:
    """What repeats a run."""
    only = " ".join(f'"{name}"' for name in names)
    return f"python -m tests.chaos.soak --seed {seed} --only {only}"


def settings_of(seed: int) -> dict[str, Any]:
    """Windows are replicated in every other run that has some."""
    return {"window_keys": "replicated"} if FAMILIES[seed % len(FAMILIES)] == "gemma3" and seed % 2 else {}


async def play(seed: int, names: Sequence[str], table: Table, until: float) -> None:
    """A run: faults of these names in their order, as many as begin in time. Raises what was wrong, with the line that
    repeats it."""
    done = list[str]()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        reference = make_reference(Path(folder) / "model", FAMILIES[seed % len(FAMILIES)], seed)
        async with Service(Path(folder), reference, **settings_of(seed)) as service:
            try:
                await service.prepare()
                for name in names:
                    if time.monotonic() < until:
                        done.append(name)
                        await meet(service, name, seed, table.setdefault(name, Row()))
                await service.check_swept()
                await service.stop()
            except BaseException as error:
                error.add_note(f"{service.log}\nto repeat it:\n  {line(seed, done)}")
                raise


async def meet(service: Service, name: str, seed: int, row: Row) -> None:
    """One fault, and all that must be true after it."""
    chance = random.Random(f"{seed} {name}")
    epoch, pids = (await service.client.cluster()).epoch, await service.pids()
    load = Load(service.client, service.reference, chance)
    try:
        await load.wait_begun()
        began = time.monotonic()
        outcome = await FAULTS[name](Scene(service, pids, chance, load))
        healed = await service.wait_healed(set(outcome.gone), epoch + outcome.num_epochs)
        row.seconds += time.monotonic() - began
        await load.end()
    finally:
        await load.cancel()
    if name in NO_LOSS:
        assert healed.epoch == epoch, healed.losses
    keys, logits = await service.check()
    row.times, row.epochs, row.told = row.times + 1, row.epochs + healed.epoch - epoch, row.told + load.told
    row.keys, row.logits = max(row.keys, keys), max(row.logits, logits)
    print(f"{name}: {healed.epoch - epoch} epochs, whole after {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="new runs begin until then")
    parser.add_argument("--seed", type=int, help="of one run; by default a fresh one for each of many")
    parser.add_argument("--only", nargs="+", choices=FAULTS, help="faults, in this order")
    given = parser.parse_args()
    began, table, runs = time.monotonic(), Table(), 0
    until = began + 60 * (given.minutes or MOST_SECONDS / 60)
    try:
        while not runs or (given.minutes and time.monotonic() < until):
            seed = given.seed if given.seed is not None and not runs else random.SystemRandom().randrange(1_000_000)
            names = given.only or deal(seed)
            print(f"run {runs + 1}, seed {seed}: {line(seed, names)}", flush=True)
            asyncio.run(play(seed, names, table, min(until, time.monotonic() + MOST_SECONDS)))
            runs += 1
    finally:
        print(f"{show(table)}\n{runs} runs found nothing wrong, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
