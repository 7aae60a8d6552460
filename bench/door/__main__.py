"""The cost of the door compared with the gRPC client, and the load time of its page.

    python -m bench.door --json                              # all parts
    python -m bench.door --only paced --repeats 2            # one part, smaller
    python -m bench.door --only page --into door.json        # puts one part into a file with others

real       64 streams of the embedded model, ranks on the same processors: deltas per second through the door
           (door_per_s) and over gRPC (grpc_per_s), turn by turn; ratio is of the medians. door_cpu_s_per_1000: CPU
           seconds of the door per 1,000 deltas; client_us: CPU time of the clients per delta, as both run on this
           machine. first_ms: the first token of a short prompt on an idle service; through the door each request opens
           a new connection
paced      the same with a service whose answers cost nothing and bring a token each 50 ms to every stream: whether the
           door keeps up
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

from bench.door.page import measure_page
from bench.door.reading import (
    Pace,
    first_over_grpc,
    first_through_door,
    over_grpc,
    pace,
    through_door,
)
from bench.door.services import STREAMS, Doored, paced, real
from bench.durable.options import Goal, Row, spread
from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.parts import parser_of, run_parts
from bench.production.options import Options, result
from bench.production.others import Others
from longleaf.client import AsyncClient

WARM_UP_SECONDS = 2.0
FIRST_TOKENS = 20
GRPC, DOOR = 0, 1
Open = Callable[[Options], AbstractContextManager[Doored]]


def measure_streams(open_service: Open, wanted: float, options: Options) -> Row:
    """Turns of both, each side first in every other one."""
    with open_service(options) as doored:
        paces, firsts = asyncio.run(_turns(doored, options))
    rates = [[turn.per_s for turn in side] for side in paces]
    ratio = median(rates[DOOR]) / median(rates[GRPC])
    each = [door / grpc for grpc, door in zip(*rates, strict=True)]
    cpu = [turn.door_cpu / turn.deltas * 1000 for turn in paces[DOOR]]
    clients = [median(turn.client_cpu / turn.deltas * 1e6 for turn in side) for side in paces]
    delays = [median(side) * 1e3 for side in firsts]
    figures = {
        "streams": STREAMS,
        "grpc_per_s": round(median(rates[GRPC]), 1),
        "door_per_s": round(median(rates[DOOR]), 1),
        "ratio": round(ratio, 4),
        **spread("ratio", each),
        "door_cpu_s_per_1000": round(median(cpu), 4),
        "client_us_grpc": round(clients[GRPC], 1),
        "client_us_door": round(clients[DOOR], 1),
        "first_ms_grpc": round(delays[GRPC], 2),
        "first_ms_door": round(delays[DOOR], 2),
    }
    goals = [
        Goal("ratio", ratio, wanted, is_least=True),
        Goal("first_token_more_ms", delays[DOOR] - delays[GRPC], 5.0),
    ]
    return result(options, figures, goals)


async def _turns(doored: Doored, options: Options) -> tuple[list[list[Pace]], list[list[float]]]:
    """For both sides: the pace of each turn, and seconds to the first tokens."""
    paces, firsts = [list[Pace](), list[Pace]()], [list[float](), list[float]()]
    async with AsyncClient(doored.address, retries=0) as client:
        reads = over_grpc(client, doored.prompt), through_door(doored.url, doored.prompt)
        for _ in range(FIRST_TOKENS):
            firsts[GRPC].append(await first_over_grpc(client, doored.prompt))
            firsts[DOOR].append(await first_through_door(doored.url, doored.prompt))
        for read in reads:
            await pace(read, STREAMS, WARM_UP_SECONDS, doored.door)
        for turn in range(options.repeats):
            for side in (GRPC, DOOR) if turn % 2 else (DOOR, GRPC):
                paces[side].append(await pace(reads[side], STREAMS, options.seconds, doored.door))
            log(f"turn {turn + 1}: {paces[GRPC][-1].per_s:.0f} deltas/s over gRPC, {paces[DOOR][-1].per_s:.0f} by HTTP")
    return paces, firsts


def measure_reader(options: Options) -> Row:
    """The page of a door in front of a service that answers nothing yet."""
    with paced() as doored:
        found = measure_page(doored.url + "/", options.repeats)
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
    run_parts("door", PARTS, given, lambda name: measure(name, given))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("door", __doc__, PARTS)
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
