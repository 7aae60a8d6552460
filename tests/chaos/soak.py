"""Injects every known fault into services under load with known answers, and checks every guarantee.

    python -m tests.chaos.soak --minutes 30
    python -m tests.chaos.soak --seed 17 --only "kill two" "poison"

A run is one service with one seed, which determines the order and the details of the faults. The service must recover
completely before the next fault. Without --seed each run has a new one; with --seed only that run is executed.
"""

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.faults import FAULTS, NO_LOSS, READING, Scene
from tests.chaos.load import Load
from tests.chaos.reference import make_reference
from tests.chaos.service import Service

FAMILIES = ("llama", "gemma3", "deepseek_v3")
"""Full attention, windows, and latents."""
DEPLOYMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"weights": "sharded"},
    {"weights": "sharded", "spare_ranks": 1},
    {"weights": "sharded", "world_size": 4},
    {"weights": "sharded", "spare_ranks": 1, "world_size": 4},
)
"""Settings of the service: whole weights, or sharded ones with and without room for the weights of a lost rank."""
MOST_SECONDS = 600.0
"""Maximum duration of a run: no fault starts later."""


@dataclass
class Row:
    """Results of one fault over all its repetitions."""

    times: int = 0
    seconds: float = 0.0
    """Total time until recovery."""
    epochs: int = 0
    keys: float = 0.0
    """Largest key difference, relative to the largest key."""
    logits: float = 0.0
    """Largest logprob difference, as a share of the tolerance."""
    counts: Counter[str] = field(default_factory=Counter[str])


Table = dict[str, Row]


def format_table(table: Table) -> str:
    """Formats the table for the terminal."""
    head = f"{'fault':38} times  s/heal epochs streams  left ingests waits  keys off logprobs"
    lines = [
        f"{name:38} {row.times:5} {row.seconds / max(1, row.times):7.1f} {row.epochs:6} {row.counts['streams']:7}"
        f" {row.counts['left']:5} {row.counts['ingests']:7} {row.counts['waits']:5}"
        f" {row.keys:9.1e} {row.logits:8.0%}"
        for name, row in table.items()
    ]
    return "\n".join([head, *lines])


def shuffled_faults(seed: int) -> list[str]:
    """Every fault that the deployment of the seed allows once, in an order determined by the seed."""
    has_room = settings_of(seed).get("spare_ranks", 0)
    names = [name for name in FAULTS if has_room or name not in READING]
    random.Random(seed).shuffle(names)
    return names


def repeat_command(seed: int, names: Sequence[str]) -> str:
    """Command line that repeats a run."""
    only = " ".join(f'"{name}"' for name in names)
    return f"python -m tests.chaos.soak --seed {seed} --only {only}"


def settings_of(seed: int) -> dict[str, Any]:
    """Settings of the service in a run: each family in each deployment, in turn. Windows are replicated in every other
    run of a model with windows."""
    turn, family = divmod(seed, len(FAMILIES))
    windows = {"window_keys": "replicated"} if FAMILIES[family] == "gemma3" and seed % 2 else {}
    return {**windows, **DEPLOYMENTS[turn % len(DEPLOYMENTS)]}


async def run_faults(seed: int, names: Sequence[str], table: Table, until: float) -> None:
    """Executes a run: the faults in order, as many as start in time. Raises the first failure with the command line
    that repeats it."""
    done = list[str]()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        reference = make_reference(Path(folder) / "model", FAMILIES[seed % len(FAMILIES)], seed)
        async with Service(Path(folder), reference, **settings_of(seed)) as service:
            try:
                await service.prepare()
                for name in names:
                    if time.monotonic() < until:
                        done.append(name)
                        await run_fault(service, name, seed, table.setdefault(name, Row()))
                await service.check_swept()
                await service.stop()
            except BaseException as error:
                error.add_note(f"{service.log}\nrepeat with:\n  {repeat_command(seed, done)}")
                raise


async def run_fault(service: Service, name: str, seed: int, row: Row) -> None:
    """Injects one fault and executes all checks afterwards."""
    chance = random.Random(f"{seed} {name}")
    epoch, pids = (await service.client.cluster()).epoch, await service.pids()
    load = Load(service.client, service.reference, chance)
    try:
        await load.wait_started()
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
    row.times, row.epochs, row.counts = row.times + 1, row.epochs + healed.epoch - epoch, row.counts + load.counts
    row.keys, row.logits = max(row.keys, keys), max(row.logits, logits)
    print(f"{name}: {healed.epoch - epoch} epochs, whole after {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="start new runs until this time has passed")
    parser.add_argument("--seed", type=int, help="seed of a single run; by default each run has a new one")
    parser.add_argument("--only", nargs="+", choices=FAULTS, help="faults, in this order")
    given = parser.parse_args()
    began, table, runs = time.monotonic(), Table(), 0
    until = began + 60 * (given.minutes or MOST_SECONDS / 60)
    try:
        while not runs or (given.minutes and time.monotonic() < until):
            seed = given.seed if given.seed is not None and not runs else random.SystemRandom().randrange(1_000_000)
            names = given.only or shuffled_faults(seed)
            print(f"run {runs + 1}, seed {seed}: {repeat_command(seed, names)}", flush=True)
            asyncio.run(run_faults(seed, names, table, min(until, time.monotonic() + MOST_SECONDS)))
            runs += 1
    finally:
        print(f"{format_table(table)}\n{runs} runs passed, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
