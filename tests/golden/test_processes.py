"""Ranks as processes on separate simulated machines: their exchanges go through gloo."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.rank_manager import RankManager
from coordinator.engine.engine import Engine
from longleaf.config import EngineConfig
from longleaf.rank_protocol.rank_spec import RankSpec
from tests.support.golden.asking import answer, ingest
from tests.support.golden.states import CONTEXT_LEN
from tests.support.running import running_on
from tests.support.threads import config_for
from workers.__main__ import main


def apart(spec: RankSpec) -> None:
    main(msgspec.structs.replace(spec, node=f"machine-{spec.member}"))


@contextlib.asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[Engine]:
    fleet = LocalFleet(apart)
    control = RankManager(config, await fleet.reserve(config))
    async with running_on(fleet, control, config, max_positions=8192) as found:
        assert {ready.transport for ready in found.readies} == {"gloo"}
        yield found.engine


@pytest.mark.parametrize("window_keys", [pytest.param("sharded", marks=pytest.mark.slow), "replicated"])
async def test_tokens_equal_generate(goldens, window_keys):
    """Fresh in chunks, and kept with a question, beside each other."""
    golden = goldens("gemma3")
    config = config_for(golden.folder, world_size=3, chunk_size=300, merge="gather", window_keys=window_keys)
    async with running(config) as engine:
        await ingest(engine, "book", golden.prompt[:CONTEXT_LEN])
        requested = answer(engine, golden.prompt[CONTEXT_LEN:], "book"), answer(engine, golden.prompt)
        assert await asyncio.gather(*requested) == [golden.tokens] * 2
