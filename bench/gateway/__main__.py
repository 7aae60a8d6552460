"""The cost of the gateway compared with the gRPC client, and the load time of its page.

    python -m bench.gateway --json                              # all parts
    python -m bench.gateway --only paced --repeats 2            # one part, smaller
    python -m bench.gateway --only page --into gateway.json        # puts one part into a file with others

real       64 streams of the embedded model, ranks on the same processors: deltas per second through the gateway
           (gateway_per_s) and over gRPC (grpc_per_s), turn by turn; ratio is of the medians.
           gateway_cpu_s_per_1000: CPU seconds of the gateway per 1,000 deltas; client_us: CPU time of the clients
           per delta, as both run on this
           machine. first_ms: the first token of a short prompt on an idle service; through the gateway each request
           opens a new connection
paced      the same with a service whose answers cost nothing and bring a token each 50 ms to every stream: whether the
           gateway keeps up
page       milliseconds from the first byte until the page takes input (interactive_ms), in headless Chromium with an
           empty cache, and its bytes over the wire; needs the extra `browser` and chromium
others     cores used by work outside this measurement
"""

import argparse
import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from statistics import median
from typing import NamedTuple

from bench.durable.options import Goal, Row, spread
from bench.gateway.page import measure_page
from bench.gateway.reading import (
    Pace,
    first_over_grpc,
    first_through_gateway,
    over_grpc,
    pace,
    through_gateway,
)
from bench.gateway.services import STREAMS, GatewayFixture, paced, real
from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.parts import parser_of, run_parts
from bench.production.options import Options, result
from bench.production.others import Others
from longleaf.client import AsyncClient

WARM_UP_SECONDS = 2.0
FIRST_TOKENS = 20
GRPC, GATEWAY = 0, 1
Open = Callable[[Options], AbstractContextManager[GatewayFixture]]


def measure_streams(open_service: Open, wanted: float, options: Options) -> Row:
    """Turns of both, each side first in every other one."""
    with open_service(options) as fixture:
        paces, firsts = asyncio.run(_turns(fixture, options))
    rates = [[turn.per_s for turn in side] for side in paces]
    ratio = median(rates[GATEWAY]) / median(rates[GRPC])
    each = [gateway / grpc for grpc, gateway in zip(*rates, strict=True)]
    cpu = [turn.gateway_cpu / turn.deltas * 1000 for turn in paces[GATEWAY]]
    clients = [median(turn.client_cpu / turn.deltas * 1e6 for turn in side) for side in paces]
    delays = [median(side) * 1e3 for side in firsts]
    figures = {
        "streams": STREAMS,
        "grpc_per_s": round(median(rates[GRPC]), 1),
        "gateway_per_s": round(median(rates[GATEWAY]), 1),
        "ratio": round(ratio, 4),
        **spread("ratio", each),
        "gateway_cpu_s_per_1000": round(median(cpu), 4),
        "client_us_grpc": round(clients[GRPC], 1),
        "client_us_gateway": round(clients[GATEWAY], 1),
        "first_ms_grpc": round(delays[GRPC], 2),
        "first_ms_gateway": round(delays[GATEWAY], 2),
    }
    goals = [
        Goal("ratio", ratio, wanted, is_least=True),
        Goal("first_token_more_ms", delays[GATEWAY] - delays[GRPC], 5.0),
    ]
    return result(options, figures, goals)


async def _turns(fixture: GatewayFixture, options: Options) -> tuple[list[list[Pace]], list[list[float]]]:
    """For both sides: the pace of each turn, and seconds to the first tokens."""
    paces, firsts = [list[Pace](), list[Pace]()], [list[float](), list[float]()]
    async with AsyncClient(fixture.address, retries=0) as client:
        reads = over_grpc(client, fixture.prompt), through_gateway(fixture.url, fixture.prompt)
        for _ in range(FIRST_TOKENS):
            firsts[GRPC].append(await first_over_grpc(client, fixture.prompt))
            firsts[GATEWAY].append(await first_through_gateway(fixture.url, fixture.prompt))
        for read in reads:
            await pace(read, STREAMS, WARM_UP_SECONDS, fixture.gateway)
        for turn in range(options.repeats):
            for side in (GRPC, GATEWAY) if turn % 2 else (GATEWAY, GRPC):
                paces[side].append(await pace(reads[side], STREAMS, options.seconds, fixture.gateway))
            log(
                f"turn {turn + 1}: {paces[GRPC][-1].per_s:.0f} deltas/s over gRPC, "
                f"{paces[GATEWAY][-1].per_s:.0f} over HTTP"
            )
    return paces, firsts


def measure_reader(options: Options) -> Row:
    """The page of a gateway in front of a service that answers nothing yet."""
    with paced() as fixture:
        found = measure_page(fixture.url + "/", options.repeats)
    figures = {
        "interactive_ms": found.interactive_ms,
        **spread("interactive_ms", found.each_ms),
        "wire_bytes": found.wire_bytes,
        "requests": found.requests,
        "browser": found.browser,
    }
    goals = [Goal("interactive_ms", found.interactive_ms, 1000.0), Goal("wire_bytes", found.wire_bytes, 60_000.0)]
    return result(options, figures, goals)


class Part(NamedTuple):
    """Something to measure, and how much of it by default."""

    measure: Callable[[Options], Row]
    repeats: int
    seconds: float


PARTS = {
    "real": Part(partial(measure_streams, lambda options: real(options.world_size), 0.85), 5, 4.0),
    "paced": Part(partial(measure_streams, lambda _: paced(), 0.99), 5, 4.0),
    "page": Part(measure_reader, 10, 0.0),
}


def main() -> None:
    unwind_on_terminate()
    given = parse()
    run_parts("gateway", PARTS, given, lambda name: measure(name, given))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("gateway", __doc__, PARTS)
    parser.add_argument("--repeats", type=int, help="turns; by default each part's own number")
    parser.add_argument("--world-size", type=int, default=1, help="ranks of the service with the embedded model")
    given = parser.parse_args(arguments)
    if given.world_size < 1 or (given.repeats is not None and given.repeats < 1):
        parser.error("--repeats, --world-size: too few to measure")
    return given


def measure(name: str, given: argparse.Namespace) -> Row:
    """The results of a part."""
    part = PARTS[name]
    options = Options(repeats=given.repeats or part.repeats, seconds=part.seconds, world_size=given.world_size)
    log(f"{name}: {options.repeats} repeats")
    others = Others()
    found = part.measure(options)
    return {"others": round(others.cores, 2), **found}


if __name__ == "__main__":
    main()
