"""The gap between two decode steps: from the end of a step on the last rank to the beginning of the next one there.

Scheduling, control, commit and publishing should lie beside the ranks' work, not between their steps. Engine, control
channel, rank processes and gRPC server are the real ones; the clients that read run in a process of their own. Usage:

    python -m bench.overhead --json
    python -m bench.overhead --context 8000 --batch 1 8 --tokens 64
"""

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.subjects import EMBEDDED, Subject, subject
from bench.overhead.clients import ask, ingest
from bench.overhead.step_times import Gap, TimedMain, gaps, read
from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.rank_manager import RankManager
from coordinator.engine.engine import Engine
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from coordinator.text.renderer import Renderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.config import EngineConfig
from longleaf.rank_protocol.step import Decode, StepPlan, StepResult
from longleaf.types import ModelInfo

WARM_UP_STEPS = 8
TARGET_SHARE = 0.1


class DecodeSteps:
    """The numbers of decode steps, by the number of their rows."""

    def __init__(self) -> None:
        self.by_rows: defaultdict[int, list[int]] = defaultdict(list)

    def note(self, plan: StepPlan, _: StepResult) -> None:
        if isinstance(plan.work, Decode):
            self.by_rows[len(plan.work.rows)].append(plan.step)


def main() -> None:
    unwind_on_terminate()
    parser = argparse.ArgumentParser(
        "python -m bench.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--context", type=int, default=65536, metavar="TOKENS")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32], metavar="STREAMS")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each stream")
    parser.add_argument("--world-size", type=int, default=2)
    given = parser.parse_args()
    with subject(EMBEDDED) as measured:
        rows = asyncio.run(measure(measured, given.context, given.batch, given.tokens, given.world_size))
    worst = max(rows, key=lambda row: row["share"])
    found = {"bench": "overhead", "share": worst["share"], "us_per_step": worst["us_per_step"], "target": TARGET_SHARE}
    found |= {"context_tokens": given.context, "world_size": given.world_size, "rows": rows, "machine": describe()}
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for row in rows:
        print(f"batch {row['batch']:3}  gap {row['us_per_step']:8} us  {row['share']:.1%} of {row['step_us']} us")


async def measure(
    measured: Subject, context: int, batches: list[int], num_tokens: int, world_size: int
) -> list[dict[str, float]]:
    """One row per batch."""
    config = EngineConfig(model=str(measured.folder), world_size=world_size, max_sequences=max(batches))
    ids, loop = measured.tokens(context), asyncio.get_running_loop()
    steps: list[list[int]] = []
    deltas: list[float] = []
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        async with serving(config, measured, Path(folder)) as (decodes, address):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                log(f"ingesting {context} tokens")
                await loop.run_in_executor(pool, ingest, address, ids)
                for batch in batches:
                    log(f"batch {batch}")
                    decodes.by_rows.clear()
                    messages = await loop.run_in_executor(pool, ask, address, batch, num_tokens)
                    steps.append(decodes.by_rows[batch][WARM_UP_STEPS:])
                    deltas.append(messages / (batch * num_tokens))
        ranks = read(Path(folder), world_size)
    reported = zip(batches, steps, deltas, strict=True)
    return [row(gaps(ranks, full), batch) | {"deltas_per_token": delta} for batch, full, delta in reported]


def row(found: list[Gap], batch: int) -> dict[str, float]:
    """Over the steps in which all streams ran, without the first ones."""
    seconds, period = sum(gap.seconds for gap in found), sum(gap.period for gap in found)
    return {
        "batch": batch,
        "share": round(seconds / period, 4),
        "us_per_step": round(seconds / len(found) * 1e6, 1),
        "us_median": round(median(gap.seconds for gap in found) * 1e6, 1),
        "step_us": round((period - seconds) / len(found) * 1e6, 1),
        "steps": len(found),
    }


@asynccontextmanager
async def serving(config: EngineConfig, measured: Subject, folder: Path) -> AsyncIterator[tuple[DecodeSteps, str]]:
    """A service on its own port, without Ray. It stops at the end of the block, and then the times are in `folder`."""
    control, fleet, decodes = RankManager(config), LocalFleet(TimedMain(folder)), DecodeSteps()
    engine = Engine(control, config, measured.max_positions, observe=decodes.note)
    running: asyncio.Task[None] | None = None
    try:
        await fleet.launch(config, control.invitations, control.lost)
        await engine.start()
        running = asyncio.create_task(engine.run())
        model = ModelInfo(name=measured.name)
        tokenizer = Tokenizer.load(Path(config.model), Renderer())
        use_cases = Application(engine, tokenizer, lambda: engine.cluster(model, "local"))
        server = GrpcServer(use_cases)
        yield decodes, f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        await server.stop()
        await use_cases.close()
    finally:
        await engine.close()
        await fleet.shutdown()
        if running is not None:
            await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    main()
