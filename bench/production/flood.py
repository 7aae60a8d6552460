"""The cost of thousands of calls per second with wrong credentials: to the service, and to its streams."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.durable.options import Goal, Row
from bench.harness.arguments import log
from bench.production.callers import Called, CallLoad, call
from bench.production.options import Options, result
from bench.production.services import Running, production, running
from bench.production.streams import STREAMS, Streams
from longleaf.client import AsyncClient
from longleaf.credentials import new_credential
from tests.support.authority import Authority
from tests.support.scraping import scrape

RATE = 10_000.0
"""Calls per second that are wanted."""
FEWER = 1_000.0
LIMITED = 19
"""The nice value of callers that may only use idle CPU time."""
ELSEWHERE = "127.0.0.2"
"""Where callers are: not on the host of the streams, as the service sees it."""
METHOD = "ListContexts"
PATH = f"/longleaf.v1.ContextService/{METHOD}"
LEAD_SECONDS = 0.5
"""Calls begin this long before the measurement and continue this long after it."""
QUIET_SECONDS = 1.5
"""Until the last refused calls, which wait for a second, have gone."""
REFUSED, ANSWERED = "UNAUTHENTICATED", "OK"
WANTED_KEPT = 0.9


@dataclass(slots=True)
class Turns:
    """The measurements of one kind of calls, a number for each turn."""

    code: str
    """How they should end."""
    per_s: list[float] = field(default_factory=list[float])
    cpu_us: list[float] = field(default_factory=list[float])
    """CPU microseconds of the coordinator per call; with streams, their cost is included."""
    kept: list[float] = field(default_factory=list[float])
    """The pace of the streams, as a share of that without calls."""
    caller_cores: list[float] = field(default_factory=list[float])
    """Processors that the callers took."""
    codes: Counter[str] = field(default_factory=Counter[str])


class Flood:
    """Makes calls to a service, and measures meanwhile."""

    def __init__(self, service: Running, callers: dict[int, Executor], options: Options) -> None:
        """`callers` are processes, by how nice they are."""
        self._service = service
        self._callers = callers
        self._seconds = options.seconds
        self._credentials = {
            REFUSED: new_credential(),
            ANSWERED: str(service.settings.access.get("credential")),
        }

    async def turn(self, turns: Turns, rate: float, nice: int, streams: Streams | None = None) -> None:
        """Makes calls for one turn; with streams, also measures their pace."""
        alone = 0.0
        if streams is not None:
            alone = (await streams.pace(self._service, asyncio.sleep(self._seconds))).tokens_per_s
        async with self._calls(turns, rate, nice):
            before, cpu, began = await self._codes(), self._service.cpu_seconds, time.perf_counter()
            if streams is None:
                await asyncio.sleep(self._seconds)
            else:
                pace = await streams.pace(self._service, asyncio.sleep(self._seconds))
                turns.kept.append(pace.tokens_per_s / alone)
            cpu, seconds = self._service.cpu_seconds - cpu, time.perf_counter() - began
            codes = await self._codes() - before
        turns.codes += codes
        turns.per_s.append(codes[turns.code] / seconds)
        turns.cpu_us.append(cpu / max(1, codes[turns.code]) * 1e6)
        await asyncio.sleep(QUIET_SECONDS)

    @asynccontextmanager
    async def _calls(self, turns: Turns, rate: float, nice: int) -> AsyncIterator[None]:
        """They are made while the block runs; it must take as long as a turn. Raises OSError."""
        access = self._service.settings.access
        requested = CallLoad(
            address=self._service.address,
            tls_ca=str(access.get("tls_ca")),
            host=ELSEWHERE,
            path=PATH,
            credential=self._credentials[turns.code],
            rate=rate,
            seconds=self._seconds + 2 * LEAD_SECONDS,
        )
        calling = asyncio.get_running_loop().run_in_executor(self._callers[nice], call, requested)
        await asyncio.sleep(LEAD_SECONDS)
        try:
            yield
        finally:
            called: Called = await calling
            turns.caller_cores.append(called.cpu_seconds / requested.seconds)

    async def _codes(self) -> Counter[str]:
        """Calls of the method that have ended, by their codes, as the service counts them."""
        metrics_text = await scrape(f"http://127.0.0.1:{self._service.settings.telemetry.metrics_port}/metrics")
        codes = Counter[str]()
        for (name, labels), value in metrics_text.samples.items():
            found = dict(labels)
            if name == "longleaf_requests_total" and found["kind"] == METHOD:
                codes[found["code"]] += int(value)
        return codes


def measure(options: Options) -> Row:
    """First only calls, then calls beside streams."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        settings = production(Authority(Path(folder) / "ca"), Path(folder))
        with running(settings, options.world_size) as service, _processes() as callers:
            return asyncio.run(_measure(service, callers, options))


@contextmanager
def _processes() -> Iterator[dict[int, Executor]]:
    """That call, by how nice they are."""
    context = get_context("spawn")
    with (
        ProcessPoolExecutor(1, mp_context=context) as usual,
        ProcessPoolExecutor(1, mp_context=context, initializer=os.nice, initargs=(LIMITED,)) as limited,
    ):
        for pool in (usual, limited):
            pool.submit(os.getpid).result()  # so that it does not start in the first turn
        yield {0: usual, LIMITED: limited}


async def _measure(service: Running, callers: dict[int, Executor], options: Options) -> Row:
    flood = Flood(service, callers, options)
    quiet = {"wrong": Turns(REFUSED), "good": Turns(ANSWERED)}
    for turns in quiet.values():
        await flood.turn(Turns(turns.code), RATE, 0)  # a warm-up, which is forgotten
        for _ in range(options.repeats):
            await flood.turn(turns, RATE, 0)
    beside = {name: Turns(ANSWERED if name.startswith("good") else REFUSED) for name in CASES}
    async with AsyncClient(service.address, retries=0, **service.settings.access) as client:
        streams = Streams(client, STREAMS)
        async with streams.flowing():
            for number in range(options.repeats):
                for name, case in CASES.items():
                    # As many good calls as there were wrong ones.
                    rate = beside[case.as_many_as].per_s[-1] if case.as_many_as else case.rate
                    await flood.turn(beside[name], rate, case.nice, streams)
                log(f"turn {number + 1}: " + ", ".join(f"{name} {beside[name].kept[-1]:.2f}" for name in CASES))
    return summary(options, quiet, beside, streams.errors)


@dataclass(frozen=True, slots=True)
class Case:
    """Calls beside streams."""

    nice: int = 0
    rate: float = RATE
    as_many_as: str = ""


CASES = {
    "wrong": Case(),
    "wrong_limited": Case(LIMITED),
    "good": Case(as_many_as="wrong"),
    "good_limited": Case(LIMITED, as_many_as="wrong_limited"),
    "wrong_fewer": Case(rate=FEWER),
}


def summary(options: Options, quiet: dict[str, Turns], beside: dict[str, Turns], errors: Counter[str]) -> Row:
    """Medians over the turns."""
    figures: dict[str, object] = {"streams": STREAMS, "wanted_per_s": RATE}
    for name, turns in quiet.items():
        figures[f"{name}_alone_per_s"] = round(median(turns.per_s), 1)
        figures[f"{name}_alone_cpu_us_per_call"] = round(median(turns.cpu_us), 1)
        figures[f"{name}_alone_caller_cores"] = round(median(turns.caller_cores), 2)
    for name, turns in beside.items():
        figures[f"{name}_per_s"] = round(median(turns.per_s), 1)
        figures[f"{name}_kept"] = round(median(turns.kept), 3)
        figures[f"{name}_kept_min"] = round(min(turns.kept), 3)
        figures[f"{name}_kept_max"] = round(max(turns.kept), 3)
        figures[f"{name}_caller_cores"] = round(median(turns.caller_cores), 2)
    codes = sum((turns.codes for turns in (*quiet.values(), *beside.values())), Counter[str]())
    figures["other_codes"] = {code: count for code, count in codes.items() if code not in (REFUSED, ANSWERED)}
    figures["streams_broken"] = errors.total()
    goals = [
        Goal(f"{name}_kept", median(beside[name].kept), WANTED_KEPT, is_least=True)
        for name in CASES
        if name.startswith("wrong")
    ]
    return result(options, figures, goals)
