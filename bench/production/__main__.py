"""What the settings of production cost: services with everything off against services with all that a public one sets.

All is measured with the embedded model and real services, started as a user would start them. Usage:

    python -m bench.production --json                                    # all parts
    python -m bench.production --only cost --repeats 2 --seconds 0.5     # some, smaller
    python -m bench.production --only cost --into production.json        # puts one part into a file with others

cost       TLS, credentials of 20 tenants, metrics that are asked for once a second, and JSON logs of level info,
           against all of these off: tokens per second of 16 streams over one connection, what the coordinator computes
           per token (cpu_us_per_token) and what the client does (client_us_per_token), the first token on a connection
           that is there, and on a new one (connected). Each repeat starts one service with the settings and two
           without, which are asked by turns of `--seconds`. off_by_off tells what two services differ by that are the
           same. ratio is of medians, with the least and the most of single repeats; turn_ratio is the median of the
           ratios of turns that followed one another
rotation   from the moment at which certificate and key are others until a new connection is shown that (shown_s), while
           16 streams go on; `--seconds` is the longest time between two rotations
flood      10,000 calls a second with wrong credentials are wanted: how many the service refuses (per_s), what it
           computes of each (cpu_us_per_call) when nothing else goes on, and the share of their pace that 16 streams
           keep beside them (kept). good: as many calls of the same method with credentials that are right; fewer:
           1,000 a second; limited: the callers are so nice (19) that they get only what nobody else wants of a
           processor. caller_cores: how many processors they took; elsewhere they would have machines of their own.
           other_codes: of calls that callers broke off in the end (CANCELLED)
others     cores that work took which is no part of this

Clients and service share the machine: what encryption costs the clients is counted as well.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from bench.durable.options import Row
from bench.harness.arguments import tell, unwind_on_terminate
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
    tell(f"{name}: {options.repeats} repeats")
    others = Others()
    found = part.measure(options)
    return {"others": round(others.cores, 2), **found}


if __name__ == "__main__":
    main()
