"""Ranks against threads on one machine: ingest and decode of one service for each pair, by turns.

All services hold the model at the same time; while one works the others wait in a socket. The model is random, one of
the shapes below, or a checkpoint. Usage:

    python -m bench.threads --json
    python -m bench.threads --model thin --context 2000 --pairs 1x1 1x2
"""

import argparse
import json
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.service import Service, client_of
from longleaf.client import Client
from longleaf.config import EngineConfig
from longleaf.resources import num_processors
from zoo.checkpoints import make_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "thin": {"num_layers": 30, "hidden": 576, "num_heads": 9, "num_kv_heads": 3, "ffn": 1536},
    "flat": {"num_layers": 8, "hidden": 512, "num_heads": 8, "num_kv_heads": 2, "ffn": 1408},
}
"""The first is that of SmolLM2-135M."""
SHORT = 64
"""Tokens of the short context."""
BATCH = 8
KV_BYTES = 1_500_000_000


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    shapes = ", ".join(SHAPES)
    parser.add_argument(
        "--model", dest="models", nargs="+", default=[*SHAPES], help=f"{shapes}, or a checkpoint's folder"
    )
    parser.add_argument("--context", type=int, default=4000, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each generation, at least 2")
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of each service")
    number = num_processors()
    pairs = ["1x1", f"1x{number}", f"{number}x1"]
    parser.add_argument("--pairs", nargs="+", default=pairs, metavar="RANKSxTHREADS", help="default: %(default)s")
    options = parser.parse_args()
    rows = [row for name in options.models for row in measure_model(name, options)]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print({name: value for name, value in row.items() if name != "machine"})


def measure_model(name: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """One row per service."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder, ExitStack() as stack:
        model = Path(name)
        if name in SHAPES:
            model = make_checkpoint(Path(folder, name), "llama", max_positions=131072, **SHAPES[name])
        clients = {pair: stack.enter_context(_service(model, pair)) for pair in options.pairs}
        rows = measure({pair: Service(client) for pair, client in clients.items()}, options)
    about = {"bench": "threads", "model": name, "context_tokens": options.context, "machine": describe()}
    return [about | row for row in rows]


def _service(model: Path, pair: str) -> AbstractContextManager[Client]:
    ranks, threads = map(int, pair.split("x"))
    config = EngineConfig(
        model=str(model),
        world_size=ranks,
        threads_per_rank=threads,
        kv_bytes=KV_BYTES,
        verify_model=False,
        max_draft_tokens=0,
    )
    return client_of(None, config, "local")


def measure(services: dict[str, Service], options: argparse.Namespace) -> list[dict[str, object]]:
    """One row per service, in tokens per second. The first turn is not counted."""
    found: dict[str, dict[str, list[float]]] = {pair: {} for pair in services}
    for turn in range(options.repeats + 1):
        contexts = {f"long-{turn}": _ids(options.context, turn), f"short-{turn}": _ids(SHORT, turn)}
        for name, ids in contexts.items():
            for pair, service in services.items():
                began = time.monotonic()
                service.ingest(name, ids)
                if name.startswith("long") and turn:
                    found[pair].setdefault("ingest", []).append(len(ids) / (time.monotonic() - began))
        works = {"decode_short": ("short", 1), "decode": ("long", 1), f"decode_{BATCH}": ("long", BATCH)}
        for work, (kind, number) in works.items():
            questions = [_ids(1, 1000 + i) for i in range(number)]
            for pair, service in services.items():
                decoded = service.decode_together([f"{kind}-{turn}"] * number, questions, options.tokens)
                if turn:
                    found[pair].setdefault(work, []).append(decoded.wall_rate if number > 1 else decoded.decode_rate)
        for name in contexts:
            for service in services.values():
                service.delete(name)
        log(f"turn {turn} of {options.repeats}")
    return [{"pair": pair, **{work: round(median(rates), 1) for work, rates in found[pair].items()}} for pair in found]


def _ids(count: int, seed: int) -> list[int]:
    return Random(seed).choices(range(3, 256), k=count)


if __name__ == "__main__":
    main()
