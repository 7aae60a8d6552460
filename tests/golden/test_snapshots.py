"""Other ranks restore contexts from storage: the same bits of keys, and the answers of transformers' `generate`."""

import pytest
import torch
from msgspec.structs import replace

from tests.support.golden.asking import answer, ingest
from tests.support.golden.lasting import serving, stored_keys
from tests.support.golden.states import CONTEXT_LEN
from tests.support.threads import config_for

CUT = 300
"""Where the second document of the context begins."""

CASES = [
    pytest.param("llama", (2, 3), {}, id="llama", marks=pytest.mark.slow),
    pytest.param("gemma3", (3, 2), {"window_keys": "replicated"}, id="windows"),
    pytest.param("lfm2", (2, 3), {}, id="states"),
    pytest.param("qwen3_next", (3, 1), {}, id="recurrent", marks=pytest.mark.slow),
    pytest.param("llama", (3, 1), {"kv_dtype": "int8"}, id="int8", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", (1, 2), {}, id="latents", marks=pytest.mark.slow),
    pytest.param("gemma3", (2, 3), {}, id="windows-sharded", marks=pytest.mark.slow),
    pytest.param("llama4", (2, 4), {"window_keys": "replicated"}, id="sections", marks=pytest.mark.slow),
    pytest.param("gpt_oss", (2, 3), {"dtype": "bfloat16"}, id="bfloat16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "sizes", "settings"), CASES)
async def test_restored_contexts_equal_the_stored_ones(goldens, tmp_path, family, sizes, settings):
    golden = goldens(family)
    config = config_for(golden.folder, chunk_size=200, merge="gather", kv_bytes=8 << 20, **settings)
    async with serving(tmp_path, replace(config, world_size=sizes[0])) as first:
        await ingest(first.engine, "book", golden.prompt[:CUT])
        await ingest(first.engine, "book", golden.prompt[CUT:CONTEXT_LEN])
        before = await answer(first.engine, golden.prompt[CONTEXT_LEN:], "book")
        await first.save()
        assert len(first.segments) == 2
    saved = stored_keys(tmp_path, config.block_size)
    async with serving(tmp_path, replace(config, world_size=sizes[1])) as second:
        assert second.engine.get_context("book").state == "evicted"
        after = await answer(second.engine, golden.prompt[CONTEXT_LEN:], "book")
        if not {"kv_dtype", "dtype"} & settings.keys():
            assert before == after == golden.tokens
        assert second.num_restored == CONTEXT_LEN
        assert second.num_read <= len(golden.prompt) - CONTEXT_LEN
        await second.rewrite()
    again = stored_keys(tmp_path, config.block_size)
    assert again
    assert {key for key in saved if "windows." not in key[1]} == {key for key in again if "windows." not in key[1]}
    for key, tensor in again.items():
        assert torch.equal(tensor, saved[key]), key


@pytest.mark.slow
async def test_what_is_damaged_is_read_again_and_the_rest_comes_back(goldens, tmp_path, caplog):
    golden = goldens("llama")
    config = config_for(golden.folder, chunk_size=200, merge="gather", world_size=2, kv_bytes=8 << 20)
    async with serving(tmp_path, config) as first:
        await ingest(first.engine, "book", golden.prompt[:CONTEXT_LEN])
        await first.save()
    pieces = sorted(tmp_path.rglob("piece-*.safetensors"))
    assert len(pieces) > 1
    content = bytearray(pieces[0].read_bytes())
    content[-100] ^= 1
    pieces[0].write_bytes(content)
    async with serving(tmp_path, config) as second:
        assert await answer(second.engine, golden.prompt[CONTEXT_LEN:], "book") == golden.tokens
        assert 0 < second.num_restored < CONTEXT_LEN
        assert second.num_restored + second.num_read >= CONTEXT_LEN
        assert "is damaged; recomputing the tokens" in caplog.text
        assert not second.durability.snapshots.is_usable(second.segments[0]), "it is never believed again"
        await second.save()
    async with serving(tmp_path, config) as third:
        assert await answer(third.engine, golden.prompt[CONTEXT_LEN:], "book") == golden.tokens
        assert third.num_restored == CONTEXT_LEN


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["windows", "piece"])
async def test_a_damaged_state_is_never_used(goldens, tmp_path, caplog, kind):
    """A document whose state, or one of whose keys, is damaged is recomputed as a whole."""
    golden = goldens("lfm2")
    config = config_for(golden.folder, chunk_size=200, merge="gather", world_size=2, kv_bytes=8 << 20)
    async with serving(tmp_path, config) as first:
        await ingest(first.engine, "book", golden.prompt[:CUT])
        await ingest(first.engine, "book", golden.prompt[CUT:CONTEXT_LEN])
        await first.save()
    damaged = sorted(tmp_path.rglob(f"{kind}-*.safetensors"))[-1]
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    async with serving(tmp_path, config) as second:
        assert await answer(second.engine, golden.prompt[CONTEXT_LEN:], "book") == golden.tokens
        assert second.num_restored in (CUT, CONTEXT_LEN - CUT)
        assert "is damaged; recomputing the tokens" in caplog.text
