"""The effect of hostile clients on other clients: each attack beside one honest stream, compared with no attack.

Each attack gets a separate service. Turns without and with the attack alternate after a warm-up; results are medians.
Meanwhile an honest client reads one long stream and makes small requests, one after another. Usage:

    python -m bench.hostile --json                                  # all attacks
    python -m bench.hostile --attacks watchers calls_at_once --repeats 3
    python -m bench.hostile --list                                  # names of the attacks

stream     the longest time between two tokens of the honest stream
heartbeat  the longest time between two beats of a task that runs every 5 ms on the coordinator's event loop: the
           longest time in which no client was served (wanted: at most 100 ms more than without the attack)
callback   the 99.9th percentile of the duration of a callback on the coordinator's event loop; 0 for less than a
           millisecond. num_long_callbacks computed for more than 5 ms (wanted: at most one of a thousand, over all
           attacks together; gRPC itself takes 6 to 9 ms to receive a message of 4 MiB)
answer     the longest wait for a small honest request, from its first attempt; one request starts after the attack
peak       growth of the memory of the coordinator (plus that of the gateway where HTTP is attacked) during the turn
remaining  this memory a second after the attack, relative to its value before the first attack; the measurement
           triggers no garbage collection and no trimming (wanted: at most 64 MiB)
statuses   status codes of the attacker's calls; a CANCELLED that the attacker did not request is a fault, as is
           INTERNAL

The attacker is a separate process; elsewhere it would be a separate machine. It therefore runs at a low priority (nice
10): where both want a processor, the service gets it. attacker_cpu_s is the CPU time of the attacker, and the
row `burn` shows the effect of that CPU time with an attacker that computes without sending anything. Reads /proc, so it
needs Linux.
"""

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.memory import Memory
from bench.harness.service import START_SECONDS
from bench.hostile.attacks import ATTACKS, BARE, CREDENTIALS, Attack, Outcome, Target, attack
from bench.hostile.heartbeat import Beats, command, quantile
from bench.hostile.honest import CONTEXT, NAME, Honest
from bench.serve.load import Documents
from longleaf.client import AsyncClient
from longleaf.config import DataConfig, EngineConfig, embedded_model
from longleaf.credentials import CredentialEntry, Quotas, digest_of, line_of
from longleaf.launch import ServiceProcess
from longleaf.service_settings import HttpConfig, SecurityConfig, ServiceConfig

TARGETS = {"heartbeat_more_ms": 100.0, "remaining_mib": 64.0}
LONG_CALLBACK_SECONDS = 0.005
MOST_CALLBACKS = 0.999
"""This part of them computes at most for so long."""
FAULTS = ("CANCELLED" + BARE, "INTERNAL", "INTERNAL" + BARE, "UNKNOWN" + BARE)
NICE = 10
CONTEXT_TOKENS = 2000
BYTES = 256
"""Token ids of the embedded model that are bytes."""
WARM_UP_SECONDS = 0.5
QUIET_SECONDS = 1.0
ANSWER_SECONDS = 60.0
"""Timeout of a small request. After a timeout the service is replaced."""
MOST_REMAINING_MIB = 1024
"""A service that keeps more is replaced: the next attacks shall not fill this machine."""
MIB = 1 << 20


@dataclass(slots=True)
class Turns:
    """Measurements of one attack: a number for each turn, by kind."""

    alone: list[dict[str, float]] = field(default_factory=list)
    attacked: list[dict[str, float]] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Errors that the honest client received."""
    num_unanswered: int = 0
    num_died: int = 0
    """Services that ended under an attack."""

    @property
    def count(self) -> int:
        return len(self.attacked) + self.num_died


class Watch:
    """Measures a service that runs."""

    def __init__(self, target: Target, beats: Beats, honest: Honest) -> None:
        self._target = target
        self._beats = beats
        self._honest = honest
        self._memories = [Memory(pid) for pid in (beats.pid, *gateways_of(beats.pid))]
        self._stood = 0

    async def warm_up(self) -> None:
        """Warms up the service. Its resident memory afterwards is the baseline of the attacks."""
        async with self._honest.streaming():
            await self._turn(asyncio.sleep(WARM_UP_SECONDS))
        self._stood = self._resident

    @property
    def _resident(self) -> int:
        return sum(memory.resident for memory in self._memories)

    async def pair(self, name: str, seconds: float, attackers: Executor, turns: Turns) -> bool:
        """Runs a turn without the attack and one with it. Returns whether the service is fit for another pair. Raises
        OSError if the service dies."""
        async with self._honest.streaming():
            _, alone = await self._turn(asyncio.sleep(seconds))
            calls = asyncio.get_running_loop().run_in_executor(attackers, attack, name, self._target, seconds)
            outcome, attacked = await self._turn(calls)
            await asyncio.sleep(QUIET_SECONDS)
            assert isinstance(outcome, Outcome)
            attacked["remaining_mib"] = (self._resident - self._stood) / MIB
            attacked["attacker_cpu_s"] = outcome.cpu_seconds
        turns.alone.append(alone)
        turns.attacked.append(attacked)
        turns.statuses.update(outcome.statuses)
        return self._honest.was_answered and attacked["remaining_mib"] <= MOST_REMAINING_MIB

    async def _turn(self, work: Awaitable[object]) -> tuple[object, dict[str, float]]:
        """Runs `work` beside the honest client; returns its result and the measurements."""
        stop = asyncio.Event()
        for memory in self._memories:
            memory.reset_peak()
        stood, began = self._resident, time.monotonic()
        asking = asyncio.create_task(self._honest.ask_until(stop))
        try:
            done = await work
        finally:
            stop.set()
            answer = await asking
        ended, peak = time.monotonic(), sum(memory.peak for memory in self._memories)
        heartbeat = await self._beats.longest_gap(began, ended, ANSWER_SECONDS)
        num_callbacks, long = self._beats.callbacks(began, ended)
        return done, {
            "stream_ms": self._honest.longest_gap(began, ended) * 1e3,
            "heartbeat_ms": heartbeat * 1e3,
            "callback_ms": quantile(num_callbacks, long, MOST_CALLBACKS) * 1e3,
            "num_callbacks": num_callbacks,
            "num_long_callbacks": sum(seconds > LONG_CALLBACK_SECONDS for seconds in long),
            "answer_ms": answer * 1e3,
            "peak_mib": (peak - stood) / MIB,
        }


def gateways_of(pid: int) -> list[int]:
    """The HTTP gateway that a service has started, if any."""
    return [child.pid for child in psutil.Process(pid).children() if "gateway" in child.cmdline()]


async def take_turns(
    address: str, beats: Beats, name: str, options: argparse.Namespace, attackers: Executor, turns: Turns
) -> None:
    """Continues until there are enough turns or the service is not fit for another one."""
    credential = None if ATTACKS[name].quotas is None else CREDENTIALS[NAME]
    async with AsyncClient(address, retries=0, credential=credential) as client:
        await client.ingest(CONTEXT, Documents("honest", BYTES).make(CONTEXT_TOKENS))
        honest = Honest(client, ANSWER_SECONDS)
        watch = Watch(Target(address, beats.http), beats, honest)
        await watch.warm_up()
        is_fit = True
        try:
            while is_fit and turns.count < options.repeats:
                is_fit = await watch.pair(name, options.seconds, attackers, turns)
        except OSError:
            turns.num_died += 1
    turns.num_unanswered += not honest.was_answered
    turns.errors.update(honest.errors)


def measure(name: str, options: argparse.Namespace, attackers: Executor) -> dict[str, object]:
    """The row of one attack."""
    turns = Turns()
    while turns.count < options.repeats:
        with TemporaryDirectory(prefix="longleaf-bench-") as folder:
            config, beats = config_of(ATTACKS[name], options.world_size, Path(folder)), Path(folder) / "beats"
            beats.mkdir()
            with ServiceProcess(command(beats, config)) as process:
                address = process.wait_ready(START_SECONDS)
                asyncio.run(take_turns(address, Beats(beats), name, options, attackers, turns))
    return row(name, options, turns)


def config_of(chosen: Attack, world_size: int, folder: Path) -> ServiceConfig:
    """The service that an attack is made on; its files are in `folder`."""
    model, data, security, gateway = str(embedded_model()), DataConfig(), SecurityConfig(), HttpConfig()
    if chosen.prepare is not None:
        data = DataConfig(data_dir=str(folder / "data"))
        chosen.prepare(folder / "data", model)
    if chosen.quotas is not None:
        (folder / "credentials").write_text("\n".join(map(line_of, entries(chosen.quotas))))
        security = SecurityConfig(credentials=str(folder / "credentials"))
    if chosen.has_gateway:
        gateway = HttpConfig(http=0)
    engine = EngineConfig(model=model, world_size=world_size, kv_bytes=chosen.kv_bytes // world_size)
    return ServiceConfig(engine=engine, port=0, launcher="local", data=data, security=security, gateway=gateway)


def entries(quotas: Quotas) -> list[CredentialEntry]:
    """Credentials of both tenants; the quotas are the attacker's."""
    return [
        CredentialEntry(
            tenant=tenant,
            role="user",
            digests=(digest_of(credential),),
            quotas=Quotas() if tenant == NAME else quotas,
        )
        for tenant, credential in CREDENTIALS.items()
    ]


def row(name: str, options: argparse.Namespace, turns: Turns) -> dict[str, Any]:
    """Medians and worst values; and whether the targets were met."""
    alone, attacked = medians(turns.alone), medians(turns.attacked)
    more = attacked["heartbeat_ms"] - alone["heartbeat_ms"] if attacked else None
    return {
        "bench": "hostile",
        "attack": name,
        "description": ATTACKS[name].description,
        "world_size": options.world_size,
        "repeats": options.repeats,
        "seconds": options.seconds,
        "alone": alone,
        "attacked": attacked,
        "alone_worst": worst(turns.alone),
        "attacked_worst": worst(turns.attacked),
        "heartbeat_more_ms": None if more is None else round(more, 1),
        "statuses": dict(turns.statuses),
        "honest_errors": dict(turns.errors),
        "unanswered": turns.num_unanswered,
        "died": turns.num_died,
        "targets": TARGETS,
        "met": {
            "heartbeat": not turns.num_died and more is not None and more <= TARGETS["heartbeat_more_ms"],
            "memory": not turns.num_died and attacked.get("remaining_mib", 0.0) <= TARGETS["remaining_mib"],
            "statuses": not any(turns.statuses[fault] for fault in FAULTS),
        },
        "machine": describe(),
    }


def medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(median(turn[key] for turn in turns), 1) for key in (turns[0] if turns else ())}


def worst(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(max(turn[key] for turn in turns), 1) for key in (turns[0] if turns else ())}


def line(found: Mapping[str, object]) -> str:
    """A row for people."""
    alone, attacked, met = found["alone"], found["attacked"], found["met"]
    assert isinstance(alone, dict) and isinstance(attacked, dict) and isinstance(met, dict)
    keys = ("stream_ms", "heartbeat_ms", "callback_ms", "answer_ms", "peak_mib")
    gaps = "".join(f"  {key} {alone.get(key, 0):5,.0f} ->{attacked.get(key, 0):7,.0f}" for key in keys)
    missed = ", ".join(name for name, is_met in met.items() if not is_met)
    remaining = f"  remaining_mib {attacked.get('remaining_mib', 0):6,.0f}"
    return f"{found['attack']:23}{gaps}{remaining}  {f'MISSED: {missed}' if missed else 'met'}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--list", action="store_true", help="print the attacks, and make none")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5, help="turns without and with each attack")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn, for attacks without an end")
    parser.add_argument("--world-size", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.repeats < 1 or not 0.1 <= options.seconds <= 20 or options.world_size < 1:
        parser.error("repeats and world size must be at least 1, seconds between 0.1 and 20")
    return options


def main() -> None:
    unwind_on_terminate()
    options = parse()
    if options.list:
        print("\n".join(f"{name:23} {chosen.description}" for name, chosen in ATTACKS.items()))
        return
    rows: list[dict[str, object]] = []
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=os.nice, initargs=(NICE,)) as attackers:
        attackers.submit(os.getpid).result()  # so that it does not start in the first turn
        for name in options.attacks:
            rows.append(measure(name, options, attackers))
            log(line(rows[-1]))
    print(json.dumps(rows, indent=2) if options.json else "\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
