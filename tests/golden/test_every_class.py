"""Every class of transformers that counts as a causal language model is exact, or refused: none is accepted and wrong.

Configs are the defaults of their classes with small sizes; a class that this does not make small is skipped. Families
whose settings matter are in the zoo.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from longleaf.errors import ModelRefused
from tests.support.golden.asking import answer
from tests.support.golden.plain import LOGIT_TOLERANCE, ask_plain, draw_ids
from tests.support.golden.states import Logits, running
from tests.support.threads import config_for
from workers.model import model
from zoo.checkpoints import special_tokens, write_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
    "initializer_range": 0.2,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
MAX_PARAMETERS = 20_000_000
NUM_PROMPT, NUM_NEW = 200, 8
PATIENCE = 60
"""Seconds after which a service that does not answer has failed."""
KINDS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING.keys()), key=lambda kind: kind.model_type)


def make_small(kind: type[PreTrainedConfig], folder: Path) -> None:
    """Writes a random checkpoint. Skips the test where the class has no small one."""
    try:
        names = kind().to_dict().keys()
        config = kind(**{name: value for name, value in SMALL.items() if name in names}, **SPECIAL_IDS)
        with torch.device("meta"):
            num_parameters = AutoModelForCausalLM.from_config(config).num_parameters()
        if num_parameters > MAX_PARAMETERS:
            pytest.skip(f"its config is not small with these settings: {num_parameters:,} parameters")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    except Exception as error:  # whatever a class demands of its config
        pytest.skip(f"no small model of it: {model.describe_error(error)}")
    write_tokenizer(folder, "llama", special_tokens(2), 512, 4096, None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.model_type)
async def test_a_causal_class_is_exact_or_refused(kind: type[PreTrainedConfig], tmp_path: Path) -> None:
    make_small(kind, tmp_path)
    try:
        model.load(str(tmp_path), "float32", "cpu")
    except ModelRefused as refused:
        pytest.skip(f"refused: {refused}")
    try:
        golden, _ = ask_plain(tmp_path, draw_ids(NUM_PROMPT), NUM_NEW)
    except Exception as error:  # the settings do not fit together, or it generates in a way of its own
        pytest.skip(f"transformers cannot ask it: {model.describe_error(error)}")
    logits = Logits()
    async with (
        asyncio.timeout(PATIENCE),
        running(config_for(tmp_path, world_size=2, chunk_size=64), logits.watch) as engine,
    ):
        found = await answer(engine, golden.prompt, num_new=NUM_NEW)
    pairs = zip(found, golden.tokens, strict=True)
    num_alike = next((i + 1 for i, (ours, theirs) in enumerate(pairs) if ours != theirs), NUM_NEW)
    difference = (logits.first(num_alike) - golden.logits_TV[:num_alike]).abs().max()
    assert difference <= LOGIT_TOLERANCE * golden.logits_TV.std()
