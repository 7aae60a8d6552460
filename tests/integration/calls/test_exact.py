"""Every response says whether it is exact, over real sockets, on ranks that answer by arithmetic."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.ranks.fakes import FakeRanks
from longleaf.client import AsyncClient
from longleaf.messages import Delta, Finished, Started
from tests.support import gated


async def responses(settings: dict[str, Any], folder: Path) -> list[Any]:
    """One of each kind that tells, from a service of these settings."""
    ranks = FakeRanks(settings["world_size"], 100, vocab=200)
    async with (
        gated.serving(ranks, folder, chunk_size=32, replicate_below=8, **settings) as (_, address),
        AsyncClient(address) as client,
    ):
        made = [await client.ingest("moby", tuple(range(40))), await client.fork_context("moby", "ahab", num_tokens=20)]
        asked = [event async for event in client.ask("moby", "who?", max_tokens=9)]
        text = "".join(event.text for event in asked if isinstance(event, Delta))
        stopped = [event async for event in client.ask("moby", "who?", max_tokens=9, stop=[text[0]])]
        made += [await client.get_context("ahab"), *await client.list_contexts(), await client.cluster()]
    assert [event.reason for event in stopped if isinstance(event, Finished)] == ["stop"]
    return made + [event for event in (*asked, *stopped) if isinstance(event, Started | Finished)]


@pytest.mark.parametrize(
    ("settings", "is_exact"),
    [
        ({"world_size": 2}, True),
        ({"world_size": 2, "dtype": "bfloat16"}, True),
        ({"world_size": 2, "partials": "bfloat16"}, False),
        ({"world_size": 1, "partials": "bfloat16"}, True),
        ({"world_size": 1, "kv_dtype": "int8"}, False),
    ],
)
async def test_every_response_says_whether_it_is_exact(
    tmp_path: Path, settings: dict[str, Any], is_exact: bool
) -> None:
    found = await responses(settings, tmp_path / "model")
    assert len(found) >= 9
    assert [response.is_exact for response in found] == [is_exact] * len(found)
