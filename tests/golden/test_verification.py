"""Verification tells right from wrong: over families and numeric types, and for ranks that err in different ways."""

import pytest
import torch

from coordinator.events import Ended, Prompt
from coordinator.verification import TOLERANCES
from longleaf.attention import Partial
from longleaf.sampling import Sampling
from tests.golden.states import running
from tests.golden.test_generate import LIVELY
from tests.threads import config_for

MAX_TOKENS = 6


async def compare(engine, prompt, **claims):
    sampling = Sampling(max_tokens=MAX_TOKENS, ignore_end_token=True)
    stream = engine.submit(Prompt(context=None, token_ids=prompt, sampling=sampling, is_compared=True, **claims))
    [comparison] = [event.comparison async for event in stream if isinstance(event, Ended)]
    return comparison


@pytest.mark.parametrize("family", [*LIVELY, "gpt_neox", "gpt2", "deepseek_v3"])
async def test_right_ranks_pass(goldens, family):
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=3, chunk_size=200)) as engine:
        found = await compare(engine, golden.prompt[:500])
    assert (found.failure, found.num_tokens, found.num_equal, found.num_ranks) == ("", MAX_TOKENS, MAX_TOKENS, 3)
    assert found.dtype == "float32"
    assert found.max_difference <= TOLERANCES["float32"] * found.max_logit


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("bfloat16", {"dtype": "bfloat16"}),
        ("float16", {"dtype": "float16"}),
        ("int8", {"kv_dtype": "int8"}),
        ("int8", {"kv_dtype": "int8", "dtype": "bfloat16"}),
    ],
)
async def test_coarse_types_are_named_and_pass(goldens, dtype, settings):
    golden = goldens("qwen3")
    async with running(config_for(golden.folder, world_size=2, **settings)) as engine:
        found = await compare(engine, golden.prompt[:300])
    assert found.dtype == dtype
    assert TOLERANCES["float32"] * found.max_logit < found.max_difference <= TOLERANCES[dtype] * found.max_logit


@pytest.mark.parametrize(("world_size", "dtype"), [(1, "float32"), (2, "bfloat16")])
async def test_partials_count_only_where_they_travel(goldens, world_size, dtype):
    golden = goldens("llama")
    async with running(config_for(golden.folder, world_size=world_size, partials="bfloat16")) as engine:
        assert (await compare(engine, golden.prompt[:300])).dtype == dtype


def deaf(index, rank):
    """What rank 2 has to say is lost in the merge of decoded rows."""
    merge = rank._peers.merge.merge
    if index == 2:
        rank._peers.merge.merge = lambda partial: merge(Partial.identity(*partial.out_THD.shape))


def forgetful(index, rank):
    """Rank 1 does not keep the first of its keys."""
    if index == 1:
        store = rank._pool.store
        rank._pool.store = lambda layer, slots_T, *kv: store(layer, torch.where(slots_T == 0, 1, slots_T), *kv)


def steep(index, rank):
    """Rank 0 takes the scores one percent too large."""
    kernel = rank._kernel
    if index == 0:
        rank._kernel = lambda *args: kernel(*args[:4], 1.01 * args[4], *args[5:])


def uncapped(index, rank):
    """No rank caps the scores."""
    kernel = rank._kernel
    rank._kernel = lambda *args: kernel(*args[:5], None)


@pytest.mark.parametrize(
    ("family", "spoil"),
    [("llama", deaf), ("mistral", forgetful), ("gpt_oss", steep), ("gemma2", uncapped)],
)
async def test_wrong_ranks_fail(goldens, family, spoil):
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=3, merge="gather"), spoil) as engine:
        found = await compare(engine, golden.prompt[:500])
    assert found.failure == ""
    assert found.max_difference > 10 * TOLERANCES["float32"] * found.max_logit


@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_a_lost_rank_shows_beside_the_rounding_of_8_bits(goldens, family):
    golden = goldens(family)
    config = config_for(golden.folder, world_size=3, merge="gather", kv_dtype="int8")
    async with running(config, deaf) as engine:
        found = await compare(engine, golden.prompt[:500])
    assert (found.failure, found.dtype) == ("", "int8")
    assert found.max_difference > TOLERANCES["int8"] * found.max_logit


async def test_what_cannot_be_compared_is_told_and_the_ranks_live_on(goldens):
    def lame(index, rank):
        rank._verifier._model = None

    golden = goldens("llama")
    async with running(config_for(golden.folder, world_size=2), lame) as engine:
        for _ in range(2):
            found = await compare(engine, golden.prompt[:100])
            assert found.failure.startswith("plain attention failed: ")


async def test_a_preempted_answer_is_compared_from_where_it_goes_on(goldens):
    """One generation runs at a time, and one of a higher priority takes its turn in the middle."""
    golden = goldens("llama")
    config = config_for(golden.folder, world_size=2, max_sequences=1)
    async with running(config) as engine:
        sampling = Sampling(max_tokens=40, ignore_end_token=True)
        prompt = Prompt(context=None, token_ids=golden.prompt[:300], sampling=sampling, is_compared=True, priority=-1)
        urgent = []
        async for event in engine.submit(prompt):
            if isinstance(event, Ended):
                found = event.comparison
            elif not urgent and getattr(event, "index", -1) >= 0:
                urgent.append(engine.submit(Prompt(context=None, token_ids=(5, 6, 7), sampling=sampling, priority=1)))
        [_ async for _ in urgent[0]]
    assert 0 < found.num_tokens < 40
    assert found.num_equal == found.num_tokens
    assert found.worst_index >= 40 - found.num_tokens
    assert found.max_difference <= TOLERANCES["float32"] * found.max_logit
