"""Arguments and output that the measurements share. Results go to stdout, everything else to stderr."""

import argparse
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.harness.subjects import NAMES

RESULTS = Path(__file__).parent.parent / "results"
"""The published results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The parameters of a measurement."""

    models: tuple[str, ...]
    contexts: tuple[int, ...]
    tokens: int
    repeats: int
    json: bool
    batches: tuple[int, ...] = (1,)


def unwind_on_terminate() -> None:
    """From here on a SIGTERM unwinds like an exit, so that services end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def parse(
    description: str | None, *, contexts: tuple[int, ...], tokens: int, repeats: int, batches: tuple[int, ...] = (1,)
) -> Arguments:
    """Reads the command line; the keywords are the defaults."""
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--model", dest="models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--context", dest="contexts", nargs="+", type=int, default=contexts, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed turns of each side")
    if tokens:
        parser.add_argument("--tokens", type=int, default=tokens, help="tokens to generate, at least 2")
    if len(batches) > 1:
        help = "generations at once"
        parser.add_argument("--batch", dest="batches", nargs="+", type=int, default=batches, help=help)
    given = vars(parser.parse_args())
    if min(given["repeats"], *given.setdefault("batches", batches)) < 1 or given.setdefault("tokens", 0) == 1:
        parser.error("too few repeats, generations or tokens to measure")
    for name in ("models", "contexts", "batches"):
        given[name] = tuple(given[name])
    return Arguments(**given)


def add_ray_address(parser: argparse.ArgumentParser) -> None:
    help = "measure on the Ray cluster there, on its own nodes and network, instead of on this machine"
    parser.add_argument("--ray-address", metavar="HOST:PORT", help=help)


def check_ray_address(parser: argparse.ArgumentParser, options: argparse.Namespace, **simulated: object) -> None:
    """Ends the program if options contradict `--ray-address`; `simulated` are the options that place ranks."""
    if options.ray_address is None:
        return
    for name, value in simulated.items():
        if value:
            parser.error(f"--{name}: with --ray-address, Ray places the ranks")
    if options.out == RESULTS:
        parser.error("--out: name a folder; the published results were not measured on the cluster of --ray-address")


def show(rows: list[dict[str, object]], arguments: Arguments) -> None:
    """Prints the rows, as JSON or as a table."""
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['bench']:7} {row['model']:13} {row['batch']} x {row['context_tokens']:>7} tokens"
            f" in {row.get('contexts', 1)}  ratio {row['ratio']:>6}"
            f"  ({row['service_tokens_per_s']} against {row['baseline_tokens_per_s']} tokens/s)"
        )


def log(message: str) -> None:
    """Logs progress to stderr."""
    print(message, file=sys.stderr, flush=True)
