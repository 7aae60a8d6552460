"""A service under load: open-loop arrivals over gRPC, and the latency of clients.

Requests arrive at random (Poisson, seeded) at each rate in turn, independent of the speed of the service. Usage:

    python -m bench.serve --json                                 # the embedded model, a service started here
    python -m bench.serve --rate 1 2 4 --lengths 64000 --documents shared
    python -m bench.serve --server localhost:50051 --documents prompt --lengths 2000 8000 --outputs 16 256

`shared`: all requests use one context per length, which is ingested before; `distinct`: --count contexts per length;
`prompt`: every request brings its own document, which is prefilled for it. Times count from the planned arrival. A
request is good when it was answered, and within both limits; goodput is the share of good ones among all.
"""

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.service import hosted
from bench.harness.timing import percentiles
from bench.serve.load import Answer, Documents, Request, poisson, run
from longleaf.client import AsyncClient
from longleaf.config import EngineConfig, embedded_model
from longleaf.types import Cluster

KINDS = ("shared", "distinct", "prompt")
WARM_UP = 8
"""Tokens of the generation that is made before the clock runs."""


class Load:
    """Makes the requests of one measurement."""

    def __init__(self, client: AsyncClient, cluster: Cluster, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self._cluster = cluster
        self._contexts: dict[int, list[str]] = {}

    async def prepare(self) -> None:
        """Ingests the contexts, and lets the service warm up."""
        number = {"shared": 1, "distinct": self._options.count, "prompt": 0}[self._options.documents]
        documents = self._documents("contexts")
        for length in self._options.lengths:
            names = [f"bench-serve-{length}-{i}" for i in range(number)]
            for name in names:
                log(f"ingesting {name}")
                await self._client.ingest(name, documents.make(length))
            self._contexts[length] = names
        async for _ in self._client.generate(documents.make(WARM_UP), max_tokens=WARM_UP, ignore_end_token=True):
            pass

    async def clean(self) -> None:
        """Deletes the ingested contexts."""
        for name in (name for names in self._contexts.values() for name in names):
            await self._client.delete_context(name)

    def _documents(self, purpose: str) -> Documents:
        return Documents(f"{self._options.seed} {purpose}", self._cluster.model.vocabulary_size)

    def plan(self, rate: float) -> list[Request]:
        """The same options give the same requests, independent of the service."""
        rng = random.Random(f"{self._options.seed} {rate}")
        documents = self._documents(f"questions {rate}")
        return [self._request(rng, documents, at) for at in poisson(rng, rate, self._options.duration)]

    def _request(self, rng: random.Random, documents: Documents, at: float) -> Request:
        length, num_tokens = rng.choice(self._options.lengths), rng.choice(self._options.outputs)
        names = self._contexts[length]
        question = documents.make(self._options.question if names else length)
        return Request(at, rng.choice(names) if names else None, question, num_tokens)

    async def measure(self, rate: float) -> dict[str, object]:
        """One row."""
        plan = self.plan(rate)
        log(f"{rate:g}/s: {len(plan)} requests in {self._options.duration:g} s")
        answers = await run(self._client, plan, self._options.timeout)
        options = vars(self._options)
        shown = ("documents", "lengths", "question", "outputs", "duration", "seed")
        return {
            "bench": "serve",
            "model": self._cluster.model.name,
            "world_size": self._cluster.world_size,
            "rate": rate,
            **{name: options[name] for name in shown},
            **summary(answers, self._options.max_ttft_ms, self._options.max_itl_ms),
            "machine": describe(),
        }


def summary(answers: Sequence[Answer], max_ttft_ms: float, max_itl_ms: float) -> dict[str, object]:
    """Summary statistics of the answers. Rates count from the first arrival to the last end."""
    done = [answer for answer in answers if not answer.error]
    errors = Counter(answer.error for answer in answers if answer.error)
    span = max(answer.ended for answer in answers) - min(answer.arrived for answer in answers) if answers else 0.0
    good = sum(answer.is_good(max_ttft_ms / 1e3, max_itl_ms / 1e3) for answer in answers)
    return {
        "requests": len(answers),
        "completed": len(done),
        "refused": errors.pop("refused", 0),
        "failed": dict(errors),
        **percentiles("ttft_ms", [answer.first_token for answer in done]),
        **percentiles("itl_ms", [gap for answer in done for gap in answer.gaps]),
        "requests_per_s": round(len(done) / span, 3) if span else None,
        "output_tokens_per_s": round(sum(answer.num_tokens for answer in done) / span, 2) if span else None,
        "goodput": round(good / len(answers), 4) if answers else None,
        "max_ttft_ms": max_ttft_ms,
        "max_itl_ms": max_itl_ms,
        **percentiles("late_ms", [answer.sent - answer.arrived for answer in answers]),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--server", metavar="HOST:PORT", help="a running service, instead of starting one")
    parser.add_argument("--model", type=Path, default=embedded_model(), help="checkpoint to serve")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--launcher", choices=("ray", "local"), default="local")
    rates = [1.0, 4.0, 12.0]
    parser.add_argument("--rate", nargs="+", type=float, default=rates, metavar="PER_SECOND", help="mean arrivals")
    parser.add_argument("--duration", type=float, default=30.0, metavar="SECONDS", help="per rate")
    parser.add_argument("--documents", choices=KINDS, default="shared")
    parser.add_argument("--count", type=int, default=4, help="contexts per length, when distinct")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8000], metavar="TOKENS", help="of documents")
    parser.add_argument("--question", type=int, default=32, metavar="TOKENS", help="after a context")
    parser.add_argument("--outputs", nargs="+", type=int, default=[64], metavar="TOKENS", help="to generate")
    parser.add_argument("--max-ttft-ms", type=float, default=2000.0, help="limit of a good request")
    parser.add_argument("--max-itl-ms", type=float, default=200.0, help="limit of a good request, in the mean")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="time limit of one request")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    numbers = [*options.rate, options.duration, options.count, *options.lengths, options.question, *options.outputs]
    if min(numbers) <= 0:
        parser.error("rates, durations and lengths must be above 0")
    return options


def main() -> None:
    unwind_on_terminate()
    options = parse()
    config = EngineConfig(model=str(options.model), world_size=options.world_size)
    with hosted(options.server, config, options.launcher) as address:
        rows = asyncio.run(measure(address, options))
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(lines(rows)))


async def measure(address: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """A row per rate. Refused requests are not retried: the load must not depend on the service."""
    async with AsyncClient(address, retries=0) as client:
        load = Load(client, await client.cluster(), options)
        try:
            await load.prepare()
            return [await load.measure(rate) for rate in options.rate]
        finally:
            await load.clean()


COLUMNS = {
    "rate": "rate/s",
    "requests": "asked",
    "completed": "done",
    "refused": "refused",
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p95": "p95",
    "ttft_ms_p99": "p99 ms",
    "itl_ms_p50": "ITL p50",
    "itl_ms_p95": "p95",
    "itl_ms_p99": "p99 ms",
    "output_tokens_per_s": "tokens/s",
    "goodput": "goodput",
}


def lines(rows: Sequence[dict[str, object]]) -> list[str]:
    """A table for people."""
    table = [list(COLUMNS.values())]
    table += [["-" if row[name] is None else str(row[name]) for name in COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]


if __name__ == "__main__":
    main()
