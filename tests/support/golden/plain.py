"""Small checkpoints, and the output of transformers' `generate` for them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from zoo.checkpoints import PAD_IDS, make_checkpoint
from zoo.families import Family, Hybrid, Refused

PROMPT_TOKENS = 1000
NEW_TOKENS = 48
HIDDEN = 16
"""The number of keys to hide just before the last ones, to check that hiding changes the text."""
LOGIT_TOLERANCE = 1e-4
"""Maximum difference of a float32 logit, in standard deviations of the logits."""
LIVELY = ("llama", "mistral", "llama4", "gemma2", "gpt_oss")
"""Families that differ in who sees whom, for tests that need not run on all of them."""


@dataclass(frozen=True)
class Golden:
    """A checkpoint, a prompt, the greedy continuation and the logits [T, V] from which it was chosen."""

    folder: Path
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits_TV: torch.Tensor


def make_golden(folder: Path, family: Family | Hybrid | Refused, pad_token_id: int = PAD_IDS[0]) -> Golden:
    """The first weights whose output would reveal an error."""
    for seed in range(1, 9):
        make_checkpoint(folder, family, seed=seed, pad_token_id=pad_token_id)
        golden, least_gap = ask_plain(folder, draw_ids(PROMPT_TOKENS), NEW_TOKENS)
        is_lively = len(set(golden.tokens)) > NEW_TOKENS // 3 and least_gap > 1e-3
        if is_lively and tokens_with_hidden_keys(golden, HIDDEN) != golden.tokens:
            return golden
    raise AssertionError(f"{family}: all weights repeat themselves, come close to ties, or overlook hidden keys")


def load_plain(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """By the class that the checkpoint names."""
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=dtype, **options)


def draw_ids(count: int, seed: int = 7) -> tuple[int, ...]:
    """Random ids, none of them special."""
    return tuple(torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def ask_plain(folder: Path, prompt: tuple[int, ...], num_new: int) -> tuple[Golden, float]:
    """The output of `generate`, and the smallest margin by which a token was chosen."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    model: Any = load_plain(folder)
    found = model.generate(torch.tensor([prompt]), max_new_tokens=num_new, output_scores=True, **options)
    scores_TV = torch.stack(found.scores)[:, 0]
    top_T2 = scores_TV.topk(2, dim=-1).values
    tokens = tuple(found.sequences[0, len(prompt) :].tolist())
    return Golden(folder, prompt, tokens, scores_TV), float((top_T2[:, 0] - top_T2[:, 1]).min())


@torch.inference_mode()
def tokens_with_hidden_keys(golden: Golden, count: int) -> tuple[int, ...]:
    """The greedy choice after each prefix of the text with `count` keys of the prompt hidden, before as many visible
    ones."""
    end, num_new = len(golden.prompt), len(golden.tokens)
    ids = torch.tensor([golden.prompt + golden.tokens[:-1]])
    mask = torch.ones_like(ids)
    mask[:, end - 2 * count : end - count] = 0
    positions = torch.arange(ids.shape[1])[None]
    found = load_plain(golden.folder)(ids, attention_mask=mask, position_ids=positions, logits_to_keep=num_new)
    return tuple(found.logits[0].argmax(dim=-1).tolist())
