"""The cost of production settings: services with all of them on compared with services with all off.

All parts use the embedded model and real services, started with the public command. Usage:

    python -m bench.production --json                                    # all parts
    python -m bench.production --only cost --repeats 2 --seconds 0.5     # one part, smaller
    python -m bench.production --only cost --into production.json        # puts one part into a file with others

cost       TLS, credentials of 20 tenants, metrics that are scraped once a second, and JSON logs of level info,
           against all of these off: tokens per second of 16 streams over one connection, CPU time per token
           of the coordinator (cpu_us_per_token) and the client (client_us_per_token), the first token on an existing
           connection, and on a new one (connected). Each repeat starts one service with the settings and two without,
           which are measured in turns of `--seconds`. off_by_off is the difference between the two equal services.
           ratio is of medians, with the least and the most of single repeats; turn_ratio is the median of the ratios
           of successive turns
rotation   from the change of certificate and key until a new connection gets the new certificate (shown_s), while 16
           streams continue; `--seconds` is the longest time between two rotations
flood      10,000 calls a second with wrong credentials are attempted: the number that the service refuses (per_s), its
           CPU time for each (cpu_us_per_call) while idle, and the relative speed of 16 streams beside them (kept).
           good: as many calls of the same method with valid credentials; fewer: 1,000 a second; limited: the callers
           run at nice 19, so that they get only idle processor time. caller_cores: processors that the callers used;
           elsewhere they would have separate machines. other_codes: calls that callers cancelled at the end (CANCELLED)
others     cores used by work outside this measurement

Clients and service share the machine: the clients' cost of encryption is included.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from bench.durable.options import Row
from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.parts import parser_of, run_parts
from bench.production import cost, flood, rotation
from bench.production.options import Options
from bench.production.others import Others


class Part(NamedTuple):
    """Something to measure, and how much of it by default."""

    measure: Callable[[Options], Row]
    repeats: int
    seconds: float


PARTS = {
    "cost": Part(cost.measure, 5, 1.0),
    "rotation": Part(rotation.measure, 10, 1.0),
    "flood": Part(flood.measure, 5, 2.0),
}


def main() -> None:
    unwind_on_terminate()
    given = parse()
    run_parts("production", PARTS, given, lambda name: measure(name, given))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("production", __doc__, PARTS)
    parser.add_argument("--repeats", type=int, help="rounds, rotations or turns; by default each part's own number")
    parser.add_argument("--seconds", type=float, help="of a turn; by default each part's own number")
    parser.add_argument("--world-size", type=int, default=1, help="ranks of the services")
    given = parser.parse_args(arguments)
    if given.world_size < 1 or (given.repeats is not None and given.repeats < 1):
        parser.error("--repeats, --world-size: too few to measure")
    if given.seconds is not None and not 0.1 <= given.seconds <= 60:
        parser.error("--seconds: must be between 0.1 and 60")
    return given


def measure(name: str, given: argparse.Namespace) -> Row:
    """The results of a part."""
    part = PARTS[name]
    options = Options(
        repeats=given.repeats or part.repeats, seconds=given.seconds or part.seconds, world_size=given.world_size
    )
    log(f"{name}: {options.repeats} repeats")
    others = Others()
    found = part.measure(options)
    return {"others": round(others.cores, 2), **found}


if __name__ == "__main__":
    main()
