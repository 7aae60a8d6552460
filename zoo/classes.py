"""A small random checkpoint of every class of transformers that counts as a causal language model.

A class with a family in the zoo is the same as there. The others have the defaults of their class, with small sizes for
the names that the class knows, and the settings in OWN where sizes depend on each other.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from zoo.checkpoints import make_checkpoint, special_tokens, write_tokenizer
from zoo.families import FAMILIES, HYBRIDS, LATENT_SIZES, REFUSED, SEEING, SPECIAL, Family, Hybrid, Refused

KINDS: dict[str, type[PreTrainedConfig]] = {
    kind.model_type: kind for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING.keys(), key=lambda kind: kind.model_type)
}
"""The config classes by the type of model that they name."""
PAD, VOCAB, POSITIONS, MAX_PARAMETERS = 2, 512, 4096, 20_000_000
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "attention_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "dff", "d_inner"), 96),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "feed_forward_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "decoder_layers", "encoder_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_head", "rotary_dim", "attention_head_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "num_key_value_heads": 2,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 64,
    "is_decoder": True,
    **{name: size for name, size in LATENT_SIZES.items() if not callable(size) and name != "head_dim"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": PAD,
    # the parts that process images and sound
    **dict.fromkeys(("image_size", "crop_size"), 28),
    "patch_size": 14,
    "depth": 1,
}
"""Values for the settings of these names, if a class has them."""
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
WINDOWS = ["sliding_attention", "full_attention"] * 2
OWN: dict[str, dict[str, Any]] = {
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere_compass_text": {"layer_types": WINDOWS, "rope_parameters": dict.fromkeys(WINDOWS, ROPE)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1, "layer_types": WINDOWS},
    "dots3_note": {
        "text_config": {"num_key_value_heads": 4, "head_dim": 40, "per_layer_config": {}},
        "vision_config": {"per_layer_config": {}, "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 40, "per_layer_config": {}},
    "emu3": {
        "vocabulary_map": {"<image>": 3, "<|extra_200|>": 4, "<|visual token 000000|>": 5},
        "vq_config": {"base_channels": 32, "codebook_size": 8},
    },
    "gemma3n_text": {
        "layer_types": WINDOWS,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
            "layer_types": WINDOWS,
        },
        "backbone_hidden_size": 64,
    },
    "gemma4_unified_assistant": {
        "text_config": {"model_type": "gemma4_unified_text", "num_kv_shared_layers": 4, "layer_types": WINDOWS},
        "backbone_hidden_size": 64,
    },
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 64, "output_proj_dims": 64}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "moshi": {"sliding_window": POSITIONS},
    "phimoe": {"sliding_window": POSITIONS},
    "reformer": {"axial_pos_embds_dim": [16, 48], "attn_layers": ["local", "lsh"] * 2},
    "roc_bert": {"initializer_range": 0.1},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}
"""Settings of some classes, by the type of model: where sizes belong together or have names of their own, and where the
defaults lack the layers that the models have. Moshi and PhiMoE are trained for no more positions than their window."""
NOT_ALONE: dict[str, str] = {
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "a draft model, without keys of its own"),
    "gemma3n": "its image encoder needs the package timm, which is not installed",
}
"""Why transformers makes no model of some classes."""


def family_of(kind: type[PreTrainedConfig]) -> Family | Hybrid | Refused | None:
    """The first family of the zoo whose checkpoints have configs of this class."""
    families = (*FAMILIES, *HYBRIDS, *REFUSED)
    return next((name for name in families if (SEEING.get(name) or SPECIAL[name])[0] is kind), None)


def small_config(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Any error of the class for these settings propagates."""
    return kind(**_settings(kind, deepcopy(OWN.get(kind.model_type, {}))))


def _settings(kind: type[PreTrainedConfig], own: Mapping[str, Any]) -> dict[str, Any]:
    """The small settings of a class and its parts, with `own` ones, also of the parts."""
    found = {field.name: SMALL[field.name] for field in fields(kind) if field.name in SMALL}
    names: dict[str, type[PreTrainedConfig]] = kind.sub_configs  # pyright: ignore[reportAssignmentType]
    parts = {name: _settings(_kind_of(kind, name, own), own.get(name, {})) for name in names}
    return {**found, **own, **parts}


def _kind_of(kind: type[PreTrainedConfig], part: str, own: Mapping[str, Any]) -> type[PreTrainedConfig]:
    """The class of a part; for a part of type AutoConfig, the class of its default."""
    if (named := own.get(part, {}).get("model_type")) is not None:
        return CONFIG_MAPPING[named]
    found: type[PreTrainedConfig] = kind.sub_configs[part]  # pyright: ignore[reportIndexIssue]
    return type(getattr(kind(), part)) if found is AutoConfig else found


def write_small(kind: type[PreTrainedConfig], folder: Path) -> None:
    """Writes a random checkpoint in float32, with a tokenizer. Any error of transformers for its settings propagates.
    Raises ValueError if the model is not small; the config is written before the weights.
    """
    if (family := family_of(kind)) is not None:
        make_checkpoint(folder, family, pad_token_id=PAD)
        return
    config = small_config(kind)
    config.save_pretrained(folder)
    maker = AutoModelForImageTextToText if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM
    with torch.device("meta"):
        num_parameters = maker.from_config(config).num_parameters()
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"the config gives {num_parameters:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        maker.from_config(config, dtype=torch.float32).save_pretrained(folder)
    write_tokenizer(folder, "llama", special_tokens(PAD), VOCAB, POSITIONS, None)
