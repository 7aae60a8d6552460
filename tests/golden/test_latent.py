"""DeepSeek-V3, of whose keys and values only the latents are kept. Its text is among the families of the matrix."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from longleaf.errors import ModelRefused
from tests.support.golden.asking import answer, ingest
from tests.support.golden.plain import NEW_TOKENS
from tests.support.golden.states import running
from tests.support.threads import config_for, make_spec
from workers.model import hook, latent, model
from workers.model.hook import LayerCall
from workers.rank import Rank
from zoo.checkpoints import make_checkpoint
from zoo.families import LATENT

FAMILY = "deepseek_v3"
LATENT_DIM, ROTARY_DIM = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
NUM_LAYERS = 4


async def test_a_token_takes_the_bytes_of_its_latent_and_rotary_key(goldens):
    golden = goldens(FAMILY)
    ranks = []
    config = config_for(golden.folder, world_size=2, chunk_size=500)
    async with running(config, lambda _, rank: ranks.append(rank)) as engine:
        await ingest(engine, "book", golden.prompt)
        context = engine.get_context("book")
    bytes_per_token = NUM_LAYERS * (LATENT_DIM + ROTARY_DIM) * 4
    assert context.kv_bytes == context.tokens * bytes_per_token
    pool = ranks[0].pool
    assert sum(pool.bytes_per_slot(layer) for layer in range(NUM_LAYERS)) == bytes_per_token
    memories = [t.untyped_storage() for t in (*pool.keys.values(), *pool.values.values())]
    sizes = {memory.data_ptr(): memory.nbytes() for memory in memories}
    assert sum(sizes.values()) == bytes_per_token * (pool.trash_slot + 1)


async def test_a_lost_factor_of_the_scale_is_noticed(goldens, monkeypatch):
    """The tests above can fail: without the factor that yarn adds to the scale the text changes."""
    golden = goldens(FAMILY)
    plain = (LATENT["qk_nope_head_dim"] + ROTARY_DIM) ** -0.5
    monkeypatch.setattr(hook, "LayerCall", lambda _, *values: LayerCall(plain, *values))
    async with running(config_for(golden.folder, world_size=2)) as engine:
        assert await answer(engine, golden.prompt) != golden.tokens


async def test_a_layer_without_a_rank_for_queries_is_absorbed_too(tmp_path):
    make_checkpoint(tmp_path, FAMILY)
    config = model.AutoConfig.from_pretrained(tmp_path, q_lora_rank=None)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain.save_pretrained(tmp_path)
    prompt = torch.arange(3, 90)[None]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
    wanted = plain.generate(prompt, **options)[0, prompt.shape[1] :].tolist()
    async with running(config_for(tmp_path, world_size=2)) as engine:
        assert list(await answer(engine, tuple(prompt[0].tolist()))) == wanted


def test_keys_of_quantised_weights_are_refused(goldens):
    class Quantised(nn.Linear):
        pass

    plain = AutoModelForCausalLM.from_pretrained(goldens(FAMILY).folder)
    layer = plain.model.layers[2].self_attn
    layer.kv_b_proj = Quantised(LATENT_DIM, layer.kv_b_proj.out_features, bias=False)
    with pytest.raises(ModelRefused, match="attention layer 2: kv_b_proj is Quantised"):
        latent.absorb(plain)


def test_latents_are_not_kept_in_8_bits(goldens):
    rank = Rank(make_spec(0, config_for(goldens(FAMILY).folder, kv_dtype="int8")))
    with pytest.raises(ModelRefused, match="kv_dtype: int8 .* latent attention"):
        rank.load()


def test_under_another_attention_function_the_model_is_the_plain_one(goldens):
    """So that answers can be compared with what transformers makes of the same weights."""
    golden = goldens(FAMILY)
    ids = torch.tensor([golden.prompt[:40]])
    plain = AutoModelForCausalLM.from_pretrained(golden.folder, dtype=torch.float32, attn_implementation="eager")
    loaded = model.load(str(golden.folder), "float32", "cpu").module
    loaded.set_attn_implementation("eager")
    assert torch.equal(loaded(ids).logits, plain(ids).logits)
