"""Makes small random checkpoints that behave like real ones: weights, config and a byte-level tokenizer.

The default weights of transformers repeat a few tokens for ever and so hide errors; a wide `initializer_range` gives
text that varies.
"""

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    SmolLM3Config,
)

Family = Literal["llama", "qwen3", "mistral", "smollm3", "gemma2", "gpt_oss", "deepseek_v3"]

BEGIN, END, PAD = "<s>", "</s>", "<pad>"
WINDOW = 256
SOFTCAP = 10.0
"""Of the scores of Gemma 2: low enough to change those that random weights give."""
SINK = 8.0
"""Mean of the sinks of GPT-OSS: about the logsumexp of the scores that random weights give."""
LATENT: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 32,
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
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
"""Sizes of DeepSeek-V3 that all differ, so that none can be taken for another; mscales that change the scale."""


def make_checkpoint(
    folder: Path,
    family: Family,
    *,
    seed: int = 0,
    num_layers: int = 4,
    hidden: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int | None = None,
    vocab_size: int = 512,
    max_positions: int = 8192,
    initializer_range: float = 0.2,
    chat_template: str | None = None,
) -> Path:
    """Writes a float32 checkpoint with random weights into `folder` and returns the folder.

    Mistral has a window of 256 tokens; every second layer of SmolLM3 is without positions; the tokenizer of Qwen3 has
    no begin token. Every second layer of Gemma 2 and GPT-OSS has the window; Gemma 2 caps its scores, GPT-OSS has sinks
    and experts. DeepSeek-V3 has the sizes of `LATENT`, not of the arguments, and one layer without experts. The same
    arguments give the same weights.
    """
    config = _config(family, num_layers)(
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim or hidden // num_heads,
        intermediate_size=ffn or 3 * hidden,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data += SINK
    model.save_pretrained(folder)
    _write_tokenizer(folder, family, vocab_size, max_positions, chat_template)
    return folder


def _config(family: Family, num_layers: int) -> Any:
    """The config class of a family, with what makes the family special filled in."""
    kinds: dict[Family, tuple[type[PretrainedConfig], dict[str, Any]]] = {
        "llama": (LlamaConfig, {}),
        "qwen3": (Qwen3Config, {}),
        "mistral": (MistralConfig, {"sliding_window": WINDOW}),
        "gemma2": (
            Gemma2Config,
            {"sliding_window": WINDOW, "attn_logit_softcapping": SOFTCAP, "query_pre_attn_scalar": 4},
        ),
        "gpt_oss": (GptOssConfig, {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
        "deepseek_v3": (DeepseekV3Config, LATENT),
        "smollm3": (SmolLM3Config, {"no_rope_layers": [(i + 1) % 2 for i in range(num_layers)]}),
    }
    kind, special = kinds[family]
    return lambda **common: kind(**(common | special))  # pyright: ignore[reportUnknownLambdaType]


def _write_tokenizer(
    folder: Path, family: Family, vocab_size: int, max_positions: int, chat_template: str | None
) -> None:
    """A byte-level tokenizer in which every id below `vocab_size` is a token, so that any output is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = 3 + len(alphabet)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size: {vocab_size} is below {smallest}, the special tokens and bytes")
    merges = list(itertools.islice(_pairs(), vocab_size - smallest))
    tokens = [BEGIN, END, PAD, *alphabet, *map("".join, merges)]
    if len(tokens) < vocab_size:
        raise ValueError(f"vocab_size: {vocab_size} is above {len(tokens)}, all pairs of printable characters")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.add_special_tokens([BEGIN, END, PAD])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if family != "qwen3":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _pairs() -> Iterator[tuple[str, str]]:
    """Pairs of characters, lower case first."""
    lower = string.ascii_lowercase
    printable = string.ascii_letters + string.digits + string.punctuation
    yield from ((a, b) for a in lower for b in lower)
    yield from ((a, b) for a in printable for b in printable if not (a in lower and b in lower))
