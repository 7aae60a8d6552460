"""A chunk is answered when the device has done it, not when it has been launched."""

import pytest
import torch

from coordinator.engine.engine import Engine
from coordinator.events import Document
from longleaf.config import embedded_model
from tests.support.running import running
from tests.support.threads import ThreadRanks, config_for
from workers.rank import Rank


async def test_rank_0_waits_for_its_device_once_in_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)

    def pretend(index: int, rank: Rank) -> None:
        rank._device = f"cuda:{index}"  # after the model was loaded to where it really is

    config = config_for(embedded_model(), world_size=2, chunk_size=128, merge="gather")
    engine = Engine(ThreadRanks(config, pretend), config, max_positions=4096)
    async with running(engine):
        events = [event async for event in engine.ingest(Document(context="doc", token_ids=[65] * 384))]
    assert events
    assert waited == ["cuda:0"] * 3
