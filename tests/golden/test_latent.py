"""Latent attention, of whose keys and values only the latents are stored. The families' texts are in the matrix."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, BailingHybridConfig, KimiLinearConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from longleaf.errors import ModelRefused
from tests.support.golden.asking import answer, ingest
from tests.support.golden.plain import NEW_TOKENS
from tests.support.golden.states import running
from tests.support.threads import config_for, make_spec
from workers.model import hook, latent, model
from workers.model.hook import LayerCall
from workers.rank import Rank
from zoo.checkpoints import make_checkpoint
from zoo.families import LATENT, LATENT_SIZES, ROUTED

FAMILY = "deepseek_v3"
LATENT_DIM, ROTARY_DIM = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
NUM_LAYERS = 4
LATENT_FAMILIES = (
    "deepseek_v3",
    "deepseek_v2",
    "glm4_moe_lite",
    "mistral4",
    "longcat_flash",
    "minicpm3",
    "youtu",
    "axk1",
)


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


class Quantised(nn.Linear):
    """Stands for weights of another kind than numbers."""


class Doubling(DeepseekV3Attention):
    """Looks like latent attention, and makes something of the values that absorbing would lose."""

    def expand_kv(self, kv_nope, k_rot):
        keys, values = super().expand_kv(kv_nope, k_rot)
        return keys, 2 * values


def quantise(layer):
    layer.kv_b_proj = Quantised(LATENT_DIM, layer.kv_b_proj.out_features, bias=False)


def double(layer):
    layer.__class__ = Doubling


@pytest.mark.parametrize(
    ("change", "reason"), [(quantise, "kv_b_proj is Quantised.*, not plain weights"), (double, "its outputs differ by")]
)
def test_a_layer_that_absorbing_would_change_stays_expanded(goldens, caplog, change, reason):
    hook.register()
    plain = AutoModelForCausalLM.from_pretrained(goldens(FAMILY).folder, attn_implementation=hook.NAME)
    change(plain.model.layers[2].self_attn)
    latent.absorb(plain)
    absorbed = [isinstance(layer.self_attn, latent.LatentAttention) for layer in plain.model.layers]
    assert absorbed == [True, True, False, True]
    assert re.search(f"1 of 4 layers .* expanded .*; model.layers.2.self_attn: .*{reason}", caplog.text)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_layers_of_every_class_are_absorbed_in_16_bits(tmp_path, family):
    """The comparison is made in float32; the weights stay as they are."""
    loaded = model.load(str(make_checkpoint(tmp_path, family)), "bfloat16", "cpu")
    assert {(spec.latent_dim, spec.num_stored) for spec in loaded.layers.values()} == {
        (LATENT_DIM, LATENT_DIM + ROTARY_DIM)
    }
    assert {parameter.dtype for parameter in loaded.module.parameters()} <= {torch.bfloat16, torch.float32}
    assert loaded.module.dtype == torch.bfloat16
    layers = [part for part in loaded.module.modules() if isinstance(part, latent.LatentAttention)]
    assert len(layers) == len(loaded.layers)
    assert {weight.dtype for layer in layers for weight in layer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", [KimiLinearConfig, BailingHybridConfig])
def test_layers_of_hybrid_models_are_absorbed(kind):
    """With full attention in all layers: no rotary positions in Kimi Linear, a gate behind attention in Ling."""
    sizes = {**LATENT_SIZES, **ROUTED, "num_key_value_heads": 4, "num_attention_heads": 4, "hidden_size": 64}
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_local_experts": 8}
    config = kind(**{**sizes, **layers, "intermediate_size": 96, "vocab_size": 64, "pad_token_id": 2})
    hook.register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(config, attn_implementation=hook.NAME).eval()
    latent.absorb(plain)
    assert all(isinstance(layer.self_attn, latent.LatentAttention) for layer in plain.model.layers)


@pytest.mark.extended
def test_every_class_of_transformers_with_latents_is_recognised():
    """But for those that choose their keys, which are not served."""
    folder = Path(transformers.models.__file__).parent
    files = [file for file in sorted(folder.glob("*/modeling_*.py")) if "def expand_kv" in file.read_text()]
    assert len(files) > 10
    for file in files:
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        [layer] = {kind for kind in vars(module).values() if "expand_kv" in getattr(kind, "__dict__", {})}
        config = inspect.signature(layer).parameters["config"].annotation
        with torch.device("meta"):
            made = layer(config(), 0)
        assert latent.is_latent(made) or hasattr(made, "indexer"), layer


def test_latents_are_not_stored_in_8_bits(goldens):
    rank = Rank(make_spec(0, config_for(goldens(FAMILY).folder, kv_dtype="int8")))
    with pytest.raises(ModelRefused, match="kv_dtype: int8 .* latent attention"):
        rank.load()


def test_under_another_attention_function_the_model_is_the_plain_one(goldens):
    """Answers can then be compared with those of transformers for the same weights."""
    golden = goldens(FAMILY)
    ids = torch.tensor([golden.prompt[:40]])
    plain = AutoModelForCausalLM.from_pretrained(golden.folder, dtype=torch.float32, attn_implementation="eager")
    loaded = model.load(str(golden.folder), "float32", "cpu").module
    loaded.set_attn_implementation("eager")
    assert torch.equal(loaded(ids).logits, plain(ids).logits)
