"""Contexts move to services with other ranks: the same bits of keys where nothing is recomputed, and right answers
where recomputation is needed.
"""

from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from msgspec.structs import replace

from coordinator.handlers.transfer.exports import Exports
from coordinator.handlers.transfer.imports import ImportSessions
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.types import ArchiveChunk, ExportContext, ExportedArchive, ImportHeader, ImportProgress
from tests.support.golden.asking import answer, ingest
from tests.support.golden.lasting import DurableEngine, serving, stored_keys
from tests.support.golden.states import CONTEXT_LEN
from tests.support.threads import config_for

CUT = 300
"""Where the second document of the context begins."""


async def leave(found: DurableEngine, threads: TokenizerPool) -> bytes:
    """The archive of the context."""
    archive = bytearray()
    async for part in Exports(found.engine.transfers, threads, found.engine.cluster).run(ExportContext(context="book")):
        archive += b"" if isinstance(part, ExportedArchive) else part
    return bytes(archive)


async def arrive(found: DurableEngine, archive: bytes) -> ImportProgress:
    async def sent() -> AsyncIterator[ImportHeader | ArchiveChunk]:
        yield ImportHeader()
        for at in range(0, len(archive), 100_000):
            yield ArchiveChunk(at, archive[at : at + 100_000])

    imports = ImportSessions(found.engine.transfers, 1 << 20)
    reports = [report async for report in imports.run(sent())]
    await imports.close()
    return reports[-1]


def ids_of(segments: Sequence[tuple[str, str, int]]) -> dict[str, str]:
    """Numbers of segments in their order, for other services give others."""
    return {segment: str(i) for i, segment in enumerate(sorted({segment for segment, _, _ in segments}, key=int))}


CASES = [
    pytest.param("gemma3", {"window_keys": "replicated"}, {"window_keys": "replicated"}, True, id="windows"),
    pytest.param("falcon_h1", {}, {}, True, id="states", marks=pytest.mark.extended),
    pytest.param("llama", {}, {"kv_dtype": "int8"}, False, id="other-dtype", marks=pytest.mark.slow),
    pytest.param("llama", {}, {}, True, id="llama", marks=pytest.mark.slow),
    pytest.param("llama", {"kv_dtype": "int8"}, {"kv_dtype": "int8"}, True, id="int8", marks=pytest.mark.slow),
    pytest.param("llama", {"kv_dtype": "int8"}, {}, False, id="from-int8", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", {}, {}, True, id="latents", marks=pytest.mark.slow),
    pytest.param("gemma3", {}, {"window_keys": "replicated"}, False, id="other-windows", marks=pytest.mark.slow),
    pytest.param("gemma3", {"window_keys": "replicated"}, {}, False, id="sharded", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "here", "there", "is_same"), CASES)
async def test_what_arrives_is_what_left(goldens, tmp_path, family, here, there, is_same):
    golden, threads = goldens(family), TokenizerPool()
    config = config_for(golden.folder, chunk_size=200, merge="gather", kv_bytes=8 << 20)
    async with serving(tmp_path / "here", replace(config, world_size=2, **here)) as first:
        await ingest(first.engine, "book", golden.prompt[:CUT])
        await ingest(first.engine, "book", golden.prompt[CUT:CONTEXT_LEN])
        before = await answer(first.engine, golden.prompt[CONTEXT_LEN:], "book")
        archive = await leave(first, threads)
    async with serving(tmp_path / "there", replace(config, world_size=3, **there)) as second:
        arrived = await arrive(second, archive)
        assert arrived.context is not None
        assert (arrived.context.tokens, arrived.context.state) == (CONTEXT_LEN, "evicted")
        assert arrived.key_tokens == (CONTEXT_LEN if is_same else 0)
        after = await answer(second.engine, golden.prompt[CONTEXT_LEN:], "book")
        assert second.num_restored == (CONTEXT_LEN if is_same else 0)
        if is_same:
            await second.rewrite()
    await threads.close()
    if "kv_dtype" not in {**here, **there}:
        assert after == before == golden.tokens
    if is_same:
        assert after == before
        found, wanted = (
            stored_keys(tmp_path / "there", config.block_size),
            stored_keys(tmp_path / "here", config.block_size),
        )
        names, others = ids_of(list(found)), ids_of(list(wanted))
        found = {(names[segment], name, start): bits for (segment, name, start), bits in found.items()}
        wanted = {(others[segment], name, start): bits for (segment, name, start), bits in wanted.items()}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
