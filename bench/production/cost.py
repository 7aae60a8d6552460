"""The cost of production settings in normal operation: the pace of streams, and the delay of first tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.durable.options import Goal, Row, latency, spread
from bench.harness.arguments import log
from bench.metrics import timed
from bench.production.options import Options, result
from bench.production.services import Running, everything_off, production, running
from bench.production.streams import STREAMS, Pace, Streams, first_token
from longleaf.client import AsyncClient
from tests.support.authority import Authority

WANTED_RATIO = 0.97
WANTED_MORE_MS = 1.0
SCRAPE_SECONDS = 1.0
WARM_UP_SECONDS = 1.0
TURNS = 6
"""Turns of each service in a round."""
FIRST_TOKENS, CONNECTIONS = 10, 4
"""Timed in each turn."""
OFF, ON, OFF_AGAIN = 0, 1, 2
"""The services of a round."""


@dataclass(slots=True)
class Measured:
    """The measurements of one service."""

    paces: list[Pace] = field(default_factory=list[Pace])
    first_tokens: list[float] = field(default_factory=list[float])
    """Seconds on a connection that is there."""
    connected: list[float] = field(default_factory=list[float])
    """Seconds to the first token on a new connection."""

    @property
    def tokens_per_s(self) -> float:
        return median(pace.tokens_per_s for pace in self.paces)


def measure(options: Options) -> Row:
    """Rounds of three services each, of which two have everything off. All three are up, and one is asked at a time."""
    rounds = list[tuple[Measured, ...]]()
    for number in range(options.repeats):
        rounds.append(_round(number, options))
        rates = ", ".join(f"{found.tokens_per_s:.0f}" for found in rounds[-1])
        log(f"round {number + 1}: {rates} tokens/s with all off, with production's settings, with all off again")
    return summary(options, rounds)


def _round(number: int, options: Options) -> tuple[Measured, ...]:
    with TemporaryDirectory(prefix="longleaf-bench-") as folder, ExitStack() as stack:
        authority = Authority(Path(folder) / "ca")
        reported = everything_off(), production(authority, Path(folder)), everything_off()
        services = [stack.enter_context(running(settings, options.world_size)) for settings in reported]
        found = tuple(Measured() for _ in services)
        for turn in range(TURNS + 1):
            order = [(number + turn + place) % len(services) for place in range(len(services))]
            for place in order:
                # The first turn of each warms up, and is forgotten.
                into = found[place] if turn else Measured()
                asyncio.run(_turn(services[place], options.seconds if turn else WARM_UP_SECONDS, into))
        return found


async def _turn(service: Running, seconds: float, found: Measured) -> None:
    async with _scraped(service):
        async with AsyncClient(service.address, retries=0, **service.settings.access) as client:
            await first_token(client)
            found.first_tokens += [await first_token(client) for _ in range(FIRST_TOKENS)]
            streams = Streams(client, STREAMS)
            async with streams.flowing():
                found.paces.append(await streams.pace(service, asyncio.sleep(seconds)))
            assert not streams.errors, streams.errors
        found.connected += [await _connect(service) for _ in range(CONNECTIONS)]


async def _connect(service: Running) -> float:
    """Seconds to the first token of a new connection: no other is open, which the library would use again."""
    async with AsyncClient(service.address, retries=0, **service.settings.access) as client:
        return await first_token(client)


@asynccontextmanager
async def _scraped(service: Running) -> AsyncIterator[None]:
    """Metrics, where there are any, are asked for once a second while the block runs."""
    port = service.settings.telemetry.metrics_port

    async def scrape(port: int) -> None:
        while True:
            await timed(port)
            await asyncio.sleep(SCRAPE_SECONDS)

    scraping = None if port is None else asyncio.create_task(scrape(port))
    try:
        yield
        assert scraping is None or not scraping.done(), "metrics cannot be had"
    finally:
        if scraping is not None:
            scraping.cancel()


class Both(NamedTuple):
    """Numbers of services with everything off, and with production's settings."""

    off: list[float]
    on: list[float]


def of_both(rounds: Sequence[tuple[Measured, ...]], choose: Callable[[Measured], list[float]]) -> Both:
    """Those of all rounds."""
    found = [[value for services in rounds for value in choose(services[place])] for place in (OFF, ON, OFF_AGAIN)]
    return Both(found[OFF] + found[OFF_AGAIN], found[ON])


def of_turns(rounds: Sequence[tuple[Measured, ...]], work: Callable[[float, float, float], float]) -> list[float]:
    """The result of `work` for the paces of the three services, for each turn of all rounds."""
    turns = (zip(*(found.paces for found in services), strict=True) for services in rounds)
    return [work(off.tokens_per_s, on.tokens_per_s, again.tokens_per_s) for turn in turns for off, on, again in turn]


def summary(options: Options, rounds: Sequence[tuple[Measured, ...]]) -> Row:
    """Medians over all rounds, and how the ratios of single rounds differ."""
    rates = {place: [found[place].tokens_per_s for found in rounds] for place in (OFF, ON, OFF_AGAIN)}
    off = [*rates[OFF], *rates[OFF_AGAIN]]
    ratio = median(rates[ON]) / median(off)
    each = [on * 2 / (a + b) for on, a, b in zip(rates[ON], rates[OFF], rates[OFF_AGAIN], strict=True)]
    noise = [b / a for a, b in zip(rates[OFF], rates[OFF_AGAIN], strict=True)]
    firsts, connected = (
        of_both(rounds, lambda found: found.first_tokens),
        of_both(rounds, lambda found: found.connected),
    )
    service = of_both(rounds, lambda found: [pace.service_us for pace in found.paces])
    client = of_both(rounds, lambda found: [pace.client_us for pace in found.paces])
    figures: dict[str, object] = {
        "streams": STREAMS,
        "off_tokens_per_s": round(median(off), 1),
        "on_tokens_per_s": round(median(rates[ON]), 1),
        "ratio": round(ratio, 4),
        **spread("ratio", each),
        **spread("off_by_off", noise),
        "turn_ratio": round(median(of_turns(rounds, lambda off, on, again: 2 * on / (off + again))), 4),
        "turn_off_by_off": round(median(of_turns(rounds, lambda off, _, again: again / off)), 4),
        "off_cpu_us_per_token": round(median(service.off), 1),
        "on_cpu_us_per_token": round(median(service.on), 1),
        "off_client_us_per_token": round(median(client.off), 1),
        "on_client_us_per_token": round(median(client.on), 1),
        "first_tokens": len(firsts.on),
        **latency("off_first_token", firsts.off),
        **latency("on_first_token", firsts.on),
        "connections": len(connected.on),
        **latency("off_connected", connected.off),
        **latency("on_connected", connected.on),
    }
    more_ms = (median(firsts.on) - median(firsts.off)) * 1e3
    goals = [Goal("ratio", ratio, WANTED_RATIO, is_least=True), Goal("first_token_more_ms", more_ms, WANTED_MORE_MS)]
    return result(options, figures, goals)
