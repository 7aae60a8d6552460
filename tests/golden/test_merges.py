"""Every merge, with threads as the ranks of several machines: greedy text equals transformers' `generate`."""

import json
import logging

import pytest
import torch

from longleaf.attention.packed import num_columns
from longleaf.kernels import registry
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.merge import MERGES
from tests.support.golden.asking import answer, ingest
from tests.support.golden.states import Logits, running
from tests.support.thinned import thinned
from tests.support.threads import config_for

PARTIALS_TOLERANCE = 0.05
"""Share of the largest logit: 2^-8 for each of 3 hops in 4 layers."""


async def answers(golden, machines, spoil=None, **settings):
    """To a prompt that is read in chunks, and to the same one over a context with a question."""
    config = config_for(golden.folder, world_size=len(machines), chunk_size=300, prefill="queries", **settings)
    async with running(config, spoil, machines) as engine:
        await ingest(engine, "book", golden.prompt[:960])
        return [await answer(engine, golden.prompt), await answer(engine, golden.prompt[960:], "book")]


UNEVEN = ("hierarchy", "aab")
"""Only this merge treats full machines differently from machines with fewer ranks."""
WAYS = [UNEVEN, *((merge, "aabb") for merge in MERGES), *((merge, "aab") for merge in MERGES if merge != UNEVEN[0])]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("merge", "machines"), thinned(WAYS, 1 + len(MERGES)))
async def test_tokens_equal_generate_with_every_merge(goldens, merge, machines):
    golden = goldens("llama")
    assert await answers(golden, machines, merge=merge) == [golden.tokens] * 2


async def test_bfloat16_partials_change_logits_by_their_rounding_only(goldens):
    golden, logits = goldens("gpt_oss"), Logits()
    await answers(golden, "aab", logits.watch, merge="hierarchy", merge_dtype="bfloat16")
    exact_V = golden.logits_TV[0]
    difference = (logits.first(1)[0] - exact_V).abs().max()
    assert 1e-4 < difference < PARTIALS_TOLERANCE * exact_V.abs().max()


def without_compiler():
    raise OSError("no compiler")


async def test_every_rank_gets_the_same_bits_where_one_has_no_compiler(goldens, monkeypatch, caplog):
    golden, found = goldens("llama"), {}
    makes = iter([NativeBackend, without_compiler, NativeBackend])

    def watch(index, rank):
        merge = rank.epoch.peers.merge.to_all

        def watched(partial):
            joined = merge(partial)
            found.setdefault(index, []).append(torch.cat([joined.out_THD, joined.lse_TH[..., None]], dim=-1).clone())
            return joined

        rank.epoch.peers.merge.to_all = watched

    monkeypatch.setitem(registry.TABLE, "compiled", registry.BackendEntry(lambda: next(makes)(), "cpu"))
    with caplog.at_level(logging.WARNING, "longleaf"):
        assert await answers(golden, "aaa", watch, merge="gather") == [golden.tokens] * 2
    assert next(makes, None) is None
    for others in (found[1], found[2]):
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    [line] = [message for message in caplog.messages if "fold" in message]
    assert "compiled, torch, compiled" in line


async def test_the_bytes_that_are_given_to_merges_are_counted(goldens):
    golden = goldens("llama")
    shape = json.loads((golden.folder / "config.json").read_text())
    dim = shape["hidden_size"] // shape["num_attention_heads"]
    row_bytes = shape["num_attention_heads"] * num_columns(dim, torch.float32) * 4
    config = config_for(golden.folder, world_size=2, merge="gather", prefill="keys")  # chunks merge nothing
    async with running(config) as engine:
        assert await answer(engine, golden.prompt) == golden.tokens
        num_decodes = engine.counts.steps["decode"].count
        assert engine.counts.merge_bytes == num_decodes * shape["num_hidden_layers"] * row_bytes > 0
