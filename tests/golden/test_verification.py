"""Verification separates right from wrong: over families and numeric types, and for ranks with different errors."""

import pytest
import torch

from coordinator.engine_messages import Ended, Prompt, SchedulingParams
from longleaf.attention import Partial
from longleaf.positions import OWN_ROPE
from longleaf.rank_protocol.verdict import MAX_DIFFERENCE, judge
from longleaf.sampling import SamplingParams
from tests.support.golden.asking import MAX_TOKENS, compare
from tests.support.golden.plain import LIVELY, load_plain
from tests.support.golden.states import running
from tests.support.thinned import thinned
from tests.support.threads import config_for
from workers.model import model
from workers.runners.verification import computing_in, distance, plain_attention, plain_logits


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", [*LIVELY, "gpt_neox", "gpt2", "deepseek_v3"])
async def test_right_ranks_pass(goldens, family):
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=3, chunk_size=200)) as engine:
        found = await compare(engine, golden.prompt[:500])
    assert (found.failure, found.compared_tokens, found.equal_tokens, found.holding_ranks) == (
        "",
        MAX_TOKENS,
        MAX_TOKENS,
        3,
    )
    assert (found.dtype, found.reference_dtype, found.reference_distance) == ("float32", "float32", 0.0)
    assert judge(found).passed


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "dtype", "settings"),
    [
        ("qwen3", "bfloat16", {"dtype": "bfloat16"}),
        ("qwen3", "float16", {"dtype": "float16"}),
        ("qwen3", "int8", {"kv_dtype": "int8"}),
        ("qwen3", "int8", {"kv_dtype": "int8", "dtype": "bfloat16"}),
        ("gpt_neox", "bfloat16", {"dtype": "bfloat16"}),
        ("mixtral", "bfloat16", {"dtype": "bfloat16"}),
        ("deepseek_v3", "bfloat16", {"dtype": "bfloat16"}),
        ("mistral3", "bfloat16", {"merge_dtype": "bfloat16", "merge": "gather"}),
    ],
)
async def test_coarse_types_are_named_and_pass(goldens, family, dtype, settings):
    """Even if logits differ by much, because experts are swapped or the model amplifies rounding errors."""
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=2, **settings)) as engine:
        found = await compare(engine, golden.prompt[:300])
    assert (found.dtype, found.reference_dtype) == (dtype, "bfloat16" if dtype == "int8" else dtype)
    assert found.max_difference > MAX_DIFFERENCE * found.max_logit
    assert judge(found).passed


@pytest.mark.parametrize(("world_size", "dtype"), [(1, "float32"), (2, "bfloat16")])
async def test_partials_count_only_where_they_travel(goldens, world_size, dtype):
    golden = goldens("llama")
    async with running(config_for(golden.folder, world_size=world_size, merge_dtype="bfloat16")) as engine:
        assert (await compare(engine, golden.prompt[:300])).dtype == dtype


def deaf(index, rank):
    """The contribution of rank 2 is lost in the merge of decoded rows."""
    merge = rank.epoch.peers.merge.to_all
    if index == 2:
        rank.epoch.peers.merge.to_all = lambda partial: merge(Partial.identity(*partial.out_THD.shape))


def loses_first_key(index, rank):
    """Rank 1 does not keep the first of its keys: it finds zeros there."""
    if index == 1:
        for retained in (*rank.pool.keys.values(), *rank.pool.values.values()):
            retained[:, 0].zero_()  # memory has arbitrary content before the first store
        store = rank.pool.store
        rank.pool.store = lambda backend, layer, slots_T, *kv: store(
            backend, layer, torch.where(slots_T == 0, 1, slots_T), *kv
        )


def steep(index, rank):
    """Rank 0 takes the scores one percent too large."""
    attend = rank.backend.attend
    if index == 0:
        rank.backend.attend = lambda *args: attend(*args[:4], 1.01 * args[4], *args[5:])


def uncapped(index, rank):
    """No rank caps the scores."""
    attend = rank.backend.attend
    rank.backend.attend = lambda *args: attend(*args[:5], None)


@pytest.mark.parametrize(
    ("family", "spoil"),
    [("llama", deaf), ("mistral", loses_first_key), ("gpt_oss", steep), ("gemma2", uncapped)],
)
async def test_wrong_ranks_fail(goldens, family, spoil):
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=3, merge="gather"), spoil) as engine:
        found = await compare(engine, golden.prompt[:500])
    assert found.failure == ""
    assert found.max_difference > 10 * judge(found).tolerance


COARSE = ({"dtype": "bfloat16"}, {"dtype": "float16"}, {"kv_dtype": "int8"})
CAREFUL = ("llama", "gemma3", "cohere2", "gpt_neox", "gpt_oss")
LOST = [(family, COARSE[(turn + i) % 3]) for turn in range(3) for i, family in enumerate(CAREFUL)]
"""Every family with every setting; the first five rows meet every family and every setting."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "settings"), thinned(LOST, len(CAREFUL)))
async def test_a_lost_rank_shows_beside_rounding(goldens, family, settings):
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=3, merge="gather", **settings), deaf) as engine:
        verdict = judge(await compare(engine, golden.prompt[:500]))
    assert (verdict.is_conclusive, verdict.passed) == (True, False)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_oss", "llama4", "deepseek_v3"])
def test_weights_in_bfloat16_compute_in_float32_and_stay_what_they_are(goldens, family):
    """To the last bit equal to a model whose weights were all converted at load."""
    golden = goldens(family)
    loaded, plain = model.load(str(golden.folder), "bfloat16", "cpu"), load_plain(golden.folder, torch.bfloat16).float()
    before = dict(loaded.module.named_parameters())
    plain.set_attn_implementation("eager")
    with torch.inference_mode(), computing_in(loaded.module, torch.float32):
        found_NV = plain_logits(loaded, golden.prompt[:60], 5, OWN_ROPE)
        wanted_NV = plain(torch.tensor([golden.prompt[:60]]), logits_to_keep=5).logits[0]
    assert torch.equal(found_NV, wanted_NV)
    with pytest.raises(IndexError), computing_in(loaded.module, torch.float32), plain_attention(loaded.module):
        loaded.module(torch.tensor([[1 << 20]]), use_cache=False)
    after = dict(loaded.module.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is weight for name, weight in before.items())


def test_a_distance_is_a_share_of_the_spread_and_a_median():
    exact_NV = torch.tensor([[1.0, -1.0], [11.0, 9.0], [2.0, -2.0]])
    found_NV = exact_NV + torch.tensor([[0.0, 0.1], [0.0, 7.0], [0.2, 0.0]])
    assert distance(found_NV, exact_NV) == pytest.approx(0.1 / 2**0.5)
    found_NV[1, 0] = torch.nan
    assert distance(found_NV, exact_NV) != distance(found_NV, exact_NV), "NaN, wherever it is"


async def test_a_failed_comparison_is_reported_and_the_ranks_continue(goldens):
    def lame(index, rank):
        rank.epoch._decode._verifier._model = None

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
        sampling = SamplingParams(max_tokens=40, ignore_end_token=True)
        prompt = Prompt(
            context=None,
            token_ids=golden.prompt[:300],
            sampling=sampling,
            is_compared=True,
            scheduling=SchedulingParams(priority=-1),
        )
        urgent = []
        async for event in engine.submit(prompt):
            if isinstance(event, Ended):
                found = event.comparison
            elif not urgent and getattr(event, "index", -1) >= 0:
                urgent.append(
                    engine.submit(
                        Prompt(
                            context=None,
                            token_ids=(5, 6, 7),
                            sampling=sampling,
                            scheduling=SchedulingParams(priority=1),
                        )
                    )
                )
        [_ async for _ in urgent[0]]
    assert 0 < found.compared_tokens < 40
    assert found.equal_tokens == found.compared_tokens
    assert found.worst_index >= 40 - found.compared_tokens
    assert judge(found).passed
