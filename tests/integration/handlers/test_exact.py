"""Every response reports whether it is exact, over real sockets, on ranks that answer by arithmetic."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.cluster.ports import Formation
from longleaf.client import AsyncClient
from longleaf.types import Delta, Finished, Started
from tests.support import gated
from tests.support.fakes.ranks import FakeRanks


async def responses(settings: dict[str, Any], folder: Path, make_ranks: type[FakeRanks] = FakeRanks) -> list[Any]:
    """One response of each kind that reports exactness, from a service with these settings."""
    ranks = make_ranks(settings["world_size"], 100, vocab=200)
    async with (
        gated.serving(ranks, folder, chunk_size=32, replicate_below=8, **settings) as (_, address),
        AsyncClient(address) as client,
    ):
        made = [await client.ingest("moby", tuple(range(40))), await client.fork_context("moby", "ahab", num_tokens=20)]
        requested = [event async for event in client.ask("moby", "who?", max_tokens=9)]
        text = "".join(event.text for event in requested if isinstance(event, Delta))
        stopped = [event async for event in client.ask("moby", "who?", max_tokens=9, stop=[text[0]])]
        made += [await client.get_context("ahab"), *await client.list_contexts(), await client.cluster()]
    assert [event.reason for event in stopped if isinstance(event, Finished)] == ["stop"]
    return made + [event for event in (*requested, *stopped) if isinstance(event, Started | Finished)]


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"world_size": 2}, ""),
        ({"world_size": 2, "dtype": "bfloat16"}, ""),
        ({"world_size": 2, "merge_dtype": "bfloat16"}, "partials are rounded to bfloat16"),
        ({"world_size": 1, "merge_dtype": "bfloat16"}, ""),
        ({"world_size": 1, "kv_dtype": "int8"}, "keys and values are rounded to int8"),
        ({"world_size": 1, "verify_model": False}, "not verified"),
        (
            {"world_size": 1, "kv_dtype": "int8", "verify_model": False},
            "keys and values are rounded to int8; not verified",
        ),
    ],
)
async def test_every_response_reports_whether_it_is_exact(tmp_path: Path, settings: dict[str, Any], note: str) -> None:
    found = await responses(settings, tmp_path / "model")
    assert len(found) >= 9
    assert [(response.is_exact, response.exactness_note) for response in found] == [(not note, note)] * len(found)


async def test_every_response_names_the_dequantization(tmp_path: Path) -> None:
    """Exact then refers to the dequantized weights."""
    note = "fp8 128x128 checkpoint, computed in bfloat16"

    class DequantizingRanks(FakeRanks):
        async def start(self, epoch: int) -> Formation:
            formation = await super().start(epoch)
            readies = [msgspec.structs.replace(ready, dequantization=note) for ready in formation.readies]
            return replace(formation, readies=tuple(readies))

    found = await responses({"world_size": 2}, tmp_path / "model", DequantizingRanks)
    assert [(response.is_exact, response.dequantization) for response in found] == [(True, note)] * len(found)
    found = await responses({"world_size": 2}, tmp_path / "plain")
    assert {response.dequantization for response in found} == {""}


async def test_unverified_rank_makes_answers_inexact(tmp_path: Path) -> None:
    """Not even after the first epoch: a later verification by others would be of the same model."""
    note = "not verified: plain attention failed"

    class UncertainRanks(FakeRanks):
        async def start(self, epoch: int) -> Formation:
            formation = await super().start(epoch)
            first, *others = formation.readies
            return replace(formation, readies=(msgspec.structs.replace(first, exactness_note=note), *others))

    ranks = UncertainRanks(2, 100, vocab=200)
    async with gated.serving(ranks, tmp_path / "model") as (_, address), AsyncClient(address) as client:
        found = [await client.ingest("moby", tuple(range(40))), await client.cluster()]
        found += [event async for event in client.ask("moby", "who?", max_tokens=2)]
    reported = [event for event in found if hasattr(event, "is_exact")]
    assert [(event.is_exact, event.exactness_note) for event in reported] == [(False, note)] * len(reported)
