"""An engine that holds a context of a golden prompt, and ranks that count."""

import contextlib

from coordinator.engine.engine import Engine
from coordinator.engine_messages import DocumentPrompt
from longleaf.rank_protocol.step import Decode
from tests.support.running import running
from tests.support.threads import ThreadRanks, config_for

BOUNDS = (900, 985)
"""The context is ingested in two parts; the question follows."""


class CountingRanks(ThreadRanks):
    """Notes the rows of each decode step, and the bytes of keys and values that rank 0 read."""

    def __init__(self, config):
        super().__init__(config)
        self.steps = []

    async def step(self, plan):
        result = await super().step(plan)
        if isinstance(plan.work, Decode):
            self.steps.append((len(plan.work.rows), result.kv_bytes_read))
        return result


@contextlib.asynccontextmanager
async def holding(golden, **settings):
    """An engine that holds the context, and its ranks."""
    config = config_for(golden.folder, **settings)
    ranks = CountingRanks(config)
    engine = Engine(ranks, config, max_positions=8192)
    async with running(engine):
        for start, end in zip((0, *BOUNDS), BOUNDS, strict=False):
            _ = [
                event
                async for event in engine.ingest(
                    DocumentPrompt(context="book", token_ids=golden.prompt[start:end], append=start > 0)
                )
            ]
        yield engine, ranks
