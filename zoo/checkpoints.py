"""Makes small random checkpoints that behave like real ones: weights, config and a byte-level tokenizer.

The default weights of transformers repeat a few tokens for ever and so hide errors; a wide `initializer_range` gives
text that varies.
"""

import itertools
import json
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from zoo.families import Family, Hybrid, Refused, config_of

BEGIN, END, PAD = "<s>", "</s>", "<pad>"
PAD_IDS = (2, 0)
"""Ids that a checkpoint's padding token may have; the first one is the default."""
DECAYS = 0.01, 0.5
"""Smallest and largest decay of recurrent states."""
SINK = 8.0
"""Mean of the sinks of GPT-OSS: about the logsumexp of the scores that random weights give."""


def make_checkpoint(
    folder: Path,
    family: Family | Hybrid | Refused,
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
    pad_token_id: int = PAD_IDS[0],
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a float32 checkpoint with random weights into `folder` and returns the folder.

    The tokenizer of Qwen3 has no begin token. The same arguments give the same weights. `pad_token_id` is one of
    PAD_IDS: transformers makes the embedding of the padding token zero, and many families have it as id 0. `settings`
    are further ones of the family's config, such as the sizes of recurrent states.
    """
    special = special_tokens(pad_token_id)
    config = config_of(
        family,
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
        bos_token_id=special.index(BEGIN),
        eos_token_id=special.index(END),
        pad_token_id=pad_token_id,
    )
    config.update(dict(settings or {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sees = hasattr(config, "vision_config")
        maker = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = maker.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data += SINK
        if name.endswith("A_log"):  # of recurrent states: slow decays, so that early tokens matter
            decays = torch.linspace(*DECAYS, parameter.numel(), dtype=torch.float32)
            parameter.data = decays.log().view_as(parameter)
    model.save_pretrained(folder)
    write_tokenizer(folder, family, special, vocab_size, max_positions, chat_template)
    return folder


def special_tokens(pad_token_id: int) -> list[str]:
    """The special tokens in the order of their ids, which are the first ones."""
    if pad_token_id not in PAD_IDS:
        raise ValueError(f"pad_token_id: {pad_token_id} is none of {PAD_IDS}")
    return [PAD, END, BEGIN] if pad_token_id == 0 else [BEGIN, END, PAD]


def write_tokenizer(
    folder: Path,
    family: Family | Hybrid | Refused,
    special: list[str],
    vocab_size: int,
    max_positions: int,
    chat_template: str | None,
) -> None:
    """A byte-level tokenizer in which every id below `vocab_size` is a token, so that any output is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(special) + len(alphabet)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size: {vocab_size} is below {smallest}, the special tokens and bytes")
    merges = list(itertools.islice(_pairs(), vocab_size - smallest))
    tokens = [*special, *alphabet, *map("".join, merges)]
    if len(tokens) < vocab_size:
        raise ValueError(f"vocab_size: {vocab_size} is above {len(tokens)}, all pairs of printable characters")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if family != "qwen3":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, special.index(BEGIN))]
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
