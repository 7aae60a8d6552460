"""The families of models that are checked against transformers, each with its special settings.

Configs are those of transformers. Numbers that real models reach only after thousands of tokens (windows, sections and
steps of a temperature) are small here, so that short prompts pass them several times. A new family is immediately part
of the golden tests; `python -m bench.models --family NAME --write` adds its row to docs/models.md.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal, get_args

from transformers import (
    ApertusConfig,
    AXK1Config,
    BailingHybridConfig,
    BambaConfig,
    BloomConfig,
    Cohere2Config,
    CwmConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DiffLlamaConfig,
    DogeConfig,
    Ernie4_5_MoeConfig,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    GraniteSWAConfig,
    HYV3Config,
    JambaConfig,
    Kimi_K25Config,
    KimiLinearConfig,
    Kolibri1Config,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    LongcatFlashConfig,
    MambaConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    MuseGlimmerConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoHybridConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    RecurrentGemmaConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Step3p7Config,
    YoutuConfig,
    Zamba2Config,
    ZayaConfig,
)

Family = Literal[
    "llama",
    "llama2",
    "llama3.1",
    "llama4",
    "llama4_images",
    "mistral",
    "mistral3",
    "qwen3_vl",
    "kimi_k25",
    "step3p7",
    "muse_glimmer",
    "ministral",
    "ministral3",
    "mixtral",
    "qwen2",
    "qwen2.5",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "gemma3_images",
    "phi3",
    "smollm3",
    "cohere2",
    "gpt_oss",
    "olmo2",
    "granite",
    "stablelm",
    "gpt_neox",
    "gpt2",
    "phi3_long",
    "deepseek_v3",
    "gemma4",
    "gemma4_shared",
    "minimax_m2",
    "seed_oss",
    "glm4_moe",
    "hy_v3",
    "laguna",
    "olmo3",
    "cwm",
    "exaone4",
    "kolibri1",
    "ernie4_5_moe",
    "apertus",
    "granite_swa",
    "deepseek_v2",
    "glm4_moe_lite",
    "mistral4",
    "longcat_flash",
    "minicpm3",
    "youtu",
    "axk1",
    "mimo_v2_flash",
]
FAMILIES: tuple[Family, ...] = get_args(Family)
Hybrid = Literal[
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "kimi_linear",
    "bailing_hybrid",
    "granitemoehybrid",
    "bamba",
    "nemotron_h",
    "falcon_h1",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "jamba",
]
"""Families with recurrent states beside attention."""
HYBRIDS: tuple[Hybrid, ...] = get_args(Hybrid)
Refused = Literal[
    "diffllama",
    "doge",
    "bloom",
    "gptj",
    "mamba",
    "minimax",
    "zamba2",
    "recurrent_gemma",
    "zaya",
]
"""Some of those that are not served, each for another reason."""
REFUSED: tuple[Refused, ...] = get_args(Refused)
Text = Literal["mistral4_text"]
"""Models of text that are in the tests only behind one that sees images."""
Name = Family | Hybrid | Refused | Text

WINDOW = 256
SECTION = 320
"""Section of chunked attention, in positions: no multiple of a window or of the blocks that tests use."""
TEMPERATURE_STEP = 150
SOFTCAP = 10.0
"""Cap of the scores of Gemma 2: low enough to change those that random weights give."""
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT_SIZES: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": lambda common: common["num_attention_heads"],
}
"""Sizes of latent attention that all differ, so that none can be taken for another."""
ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
LATENT: dict[str, Any] = {
    **LATENT_SIZES,
    **ROUTED,
    "num_key_value_heads": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "first_k_dense_replace": 1,
}
"""Of DeepSeek-V3: mscales that change the scale."""
ALTERNATING = ("sliding_attention", "full_attention")


Common = dict[str, Any]
"""Settings of all configs, under their transformers names."""


def _alternating(common: Common) -> list[str]:
    return [ALTERNATING[i % 2] for i in range(common["num_hidden_layers"])]


def _every_other(common: Common) -> list[int]:
    return [(i + 1) % 2 for i in range(common["num_hidden_layers"])]


def _mostly_linear(common: Common) -> list[str]:
    """As in most hybrid models, the last of four layers attends."""
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(common["num_hidden_layers"])]


def _convolving(common: Common) -> list[str]:
    return ["full_attention" if i % 2 else "conv" for i in range(common["num_hidden_layers"])]


GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
SHARED_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
"""As in Llama 3.1, for a model that was trained on 512 positions before."""
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""As in Ministral 3, for a model that was trained on 512 positions before; queries grow beyond them."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
"""As in Phi-3 with 128k positions: other factors once the text is longer than the model was trained on before."""
GEMMA4: dict[str, Any] = {
    "layer_types": _alternating,
    "sliding_window": WINDOW,
    "per_layer_config": lambda common: {i: {"head_dim": 32} for i in range(1, common["num_hidden_layers"], 2)},
    "vocab_size_per_layer_input": lambda common: common["vocab_size"],
    "hidden_size_per_layer_input": 16,
}
"""Wider heads in layers that see everything, and an embedding of the token for each layer."""

SPECIAL: dict[Name, tuple[type[PretrainedConfig], dict[str, Any | Callable[[Common], Any]]]] = {
    "llama": (LlamaConfig, {}),
    "llama2": (LlamaConfig, {"num_key_value_heads": lambda common: common["num_attention_heads"]}),
    "llama3.1": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama4": (
        Llama4TextConfig,
        {
            "attention_chunk_size": SECTION,
            "floor_scale": TEMPERATURE_STEP,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": lambda common: common["intermediate_size"],
            "num_local_experts": 4,
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "ministral": (MinistralConfig, {"sliding_window": WINDOW, "layer_types": _alternating}),
    "ministral3": (Ministral3Config, {"rope_parameters": MINISTRAL3_ROPE}),
    "mixtral": (MixtralConfig, {**EXPERTS, "sliding_window": WINDOW}),
    "qwen2": (
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": lambda common: common["num_hidden_layers"] // 2,
        },
    ),
    "qwen2.5": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": lambda common: common["intermediate_size"] // 2,
        },
    ),
    "gemma2": (
        Gemma2Config,
        {"sliding_window": WINDOW, "attn_logit_softcapping": SOFTCAP, "query_pre_attn_scalar": 4},
    ),
    "gemma3": (Gemma3TextConfig, {"sliding_window": WINDOW, "layer_types": _alternating, "query_pre_attn_scalar": 4}),
    "phi3": (Phi3Config, {"sliding_window": WINDOW, "partial_rotary_factor": 0.75}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": _every_other}),
    "cohere2": (Cohere2Config, {"sliding_window": WINDOW}),
    "gpt_oss": (GptOssConfig, {**EXPERTS, "sliding_window": WINDOW}),
    "olmo2": (Olmo2Config, {"initializer_range": 0.6}),
    "granite": (
        GraniteConfig,
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.8,
            "logits_scaling": 2.0,
        },
    ),
    "stablelm": (StableLmConfig, {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "gpt_neox": (GPTNeoXConfig, {"initializer_range": 0.6}),
    "gpt2": (GPT2Config, {"initializer_range": 0.4}),
    "deepseek_v3": (DeepseekV3Config, LATENT),
    "deepseek_v2": (DeepseekV2Config, {**LATENT_SIZES, **ROUTED, "first_k_dense_replace": 1, "q_lora_rank": None}),
    "glm4_moe_lite": (Glm4MoeLiteConfig, {**LATENT_SIZES, **ROUTED, "qk_nope_head_dim": 16}),
    "mistral4_text": (
        Mistral4Config,
        {**LATENT_SIZES, **ROUTED, "head_dim": 40, "rope_parameters": MINISTRAL3_ROPE},
    ),
    "longcat_flash": (
        LongcatFlashConfig,
        {
            **LATENT_SIZES,
            "num_layers": lambda common: common["num_hidden_layers"] // 2,
            "ffn_hidden_size": lambda common: common["intermediate_size"],
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
            "moe_topk": 3,
        },
    ),
    "minicpm3": (MiniCPM3Config, LATENT_SIZES),
    "youtu": (YoutuConfig, LATENT_SIZES),
    "axk1": (AXK1Config, {**LATENT_SIZES, **ROUTED}),
    "mimo_v2_flash": (
        MiMoV2FlashConfig,
        {
            **ROUTED,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _alternating,
        },
    ),
    "phi3_long": (Phi3Config, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
    "gemma4": (Gemma4TextConfig, {**GEMMA4, "use_bidirectional_attention": "vision"}),
    "gemma4_shared": (
        Gemma4TextConfig,
        {**GEMMA4, "num_kv_shared_layers": lambda common: common["num_hidden_layers"] // 4 * 2},
    ),
    "minimax_m2": (MiniMaxM2Config, EXPERTS),
    "seed_oss": (SeedOssConfig, {}),
    "glm4_moe": (
        Glm4MoeConfig,
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "use_qk_norm": True},
    ),
    "hy_v3": (HYV3Config, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "laguna": (
        LagunaConfig,
        {
            "layer_types": _alternating,
            "sliding_window": WINDOW,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "olmo3": (Olmo3Config, {"layer_types": _alternating, "sliding_window": WINDOW, "initializer_range": 0.6}),
    "cwm": (CwmConfig, {"layer_types": _alternating, "sliding_window": WINDOW, "rope_parameters": LLAMA3_ROPE}),
    "exaone4": (Exaone4Config, {"layer_types": _alternating, "sliding_window": WINDOW, "initializer_range": 0.6}),
    "kolibri1": (
        Kolibri1Config,
        {
            **EXPERTS,
            "layer_types": _alternating,
            "sliding_window": WINDOW,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_end_index": 3},
    ),
    "apertus": (ApertusConfig, {"rope_parameters": LLAMA3_ROPE}),
    "granite_swa": (
        GraniteSWAConfig,
        {
            "layer_types": _alternating,
            "sliding_window": WINDOW,
            "layer_rope_theta": [10000.0, 0, 10000.0, 1000000.0],
            "attention_multiplier": 0.3,
        },
    ),
    "diffllama": (DiffLlamaConfig, {}),
    "doge": (DogeConfig, {}),
    "bloom": (BloomConfig, {}),
    "gptj": (GPTJConfig, {"rotary_dim": 8}),
    "mamba": (MambaConfig, {}),
    "falcon_h1": (FalconH1Config, {**MAMBA2, "mamba_d_ssm": 128}),
    "qwen3_next": (Qwen3NextConfig, {**GATED_DELTA, **SHARED_EXPERTS}),
    "qwen3_5": (Qwen3_5TextConfig, GATED_DELTA),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, {**GATED_DELTA, **SHARED_EXPERTS}),
    "olmo_hybrid": (OlmoHybridConfig, GATED_DELTA),
    "kimi_linear": (
        KimiLinearConfig,
        {
            **LATENT_SIZES,
            "q_lora_rank": None,
            "layer_types": _mostly_linear,
            "n_group": 1,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "bailing_hybrid": (
        BailingHybridConfig,
        {
            **LATENT_SIZES,
            "layer_types": _mostly_linear,
            "n_group": 2,
            "topk_group": 1,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
        },
    ),
    "granitemoehybrid": (
        GraniteMoeHybridConfig,
        {
            **MAMBA2,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "mamba_d_conv": 4,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
        },
    ),
    "bamba": (BambaConfig, {**MAMBA2, "attn_layer_indices": [1, 2]}),
    "nemotron_h": (
        NemotronHConfig,
        {
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "full_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
    "lfm2": (Lfm2Config, {"layer_types": _convolving}),
    "lfm2_moe": (
        Lfm2MoeConfig,
        {
            "layer_types": _convolving,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "num_dense_layers": 1,
        },
    ),
    "lfm3": (Lfm3Config, {"layer_types": _convolving}),
    "jamba": (
        JambaConfig,
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
        },
    ),
    "minimax": (MiniMaxConfig, {**EXPERTS, "layer_types": _mostly_linear, "block_size": 32}),
    "zamba2": (
        Zamba2Config,
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 16,
            "mamba_headdim": 16,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "attention_head_dim": 32,
        },
    ),
    "recurrent_gemma": (RecurrentGemmaConfig, {"lru_width": 64}),
    "zaya": (ZayaConfig, {"num_experts": 4, "moe_intermediate_size": 32, "router_hidden_size": 32}),
}
"""The config class of a family, and its special settings."""
SEEING: dict[Name, tuple[type[PretrainedConfig], Family | Text | dict[str, Any], dict[str, Any]]] = {
    "gemma3_images": (Gemma3Config, "gemma3", {"mm_tokens_per_image": 4}),
    "llama4_images": (Llama4Config, "llama4", {}),
    "mistral3": (Mistral3Config, "ministral3", {}),
    "mistral4": (Mistral3Config, "mistral4_text", {}),
    "qwen3_vl": (
        Qwen3VLConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
        {"vision_config": {"depth": 1, "num_heads": 1, "deepstack_visual_indexes": [0], "out_hidden_size": 64}},
    ),
    "kimi_k25": (Kimi_K25Config, "deepseek_v3", {}),
    "step3p7": (
        Step3p7Config,
        {
            "layer_types": _alternating,
            "sliding_window": WINDOW,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
        },
        {},
    ),
    "muse_glimmer": (
        MuseGlimmerConfig,
        {"sliding_window": WINDOW},
        {"out_hidden_size": 64, "projector_hidden_size": 16},
    ),
}
"""Checkpoints that see images: their config class, their text, and the other settings. The text is a family, or the
settings of a config that belongs to this class."""
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 16,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
"""Settings of vision parts, which are not served."""


def config_of(family: Name, **common: Any) -> PretrainedConfig:
    """The config of a family: `common` are settings of all families, under their transformers names."""
    if family in SEEING:
        kind, text, special = SEEING[family]
        own = {**common, **_settings(text, common)} if isinstance(text, dict) else config_of(text, **common).to_dict()
        parts = {"text_config": own, "tie_word_embeddings": common["tie_word_embeddings"]}
        return kind(**{**parts, **special, "vision_config": {**VISION, **special.get("vision_config", {})}})
    kind, special = SPECIAL[family]
    return kind(**{**common, **_settings(special, common)})


def _settings(special: dict[str, Any | Callable[[Common], Any]], common: Common) -> dict[str, Any]:
    return {name: value(common) if callable(value) else deepcopy(value) for name, value in special.items()}
