"""Small checkpoints and what transformers' own `generate` says about them."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.checkpoints import Family, make_checkpoint

PROMPT_TOKENS = 3000
NEW_TOKENS = 64


@dataclass(frozen=True)
class Golden:
    """A checkpoint, a prompt, the greedy continuation and the logits [V] after the prompt."""

    folder: Path
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits_V: torch.Tensor


def make_golden(folder: Path, family: Family) -> Golden:
    """The fixture proves that the text is lively: weights that repeat a few tokens would hide errors."""
    make_checkpoint(folder, family, seed=1)
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(3, 512, (1, PROMPT_TOKENS), generator=generator)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    found = model.generate(prompt, max_new_tokens=NEW_TOKENS, output_scores=True, **options)
    scores_TV = torch.stack(found.scores)[:, 0]
    top_T2 = scores_TV.topk(2, dim=-1).values
    tokens = tuple(found.sequences[0, PROMPT_TOKENS:].tolist())
    assert len(set(tokens)) >= 30, "the fixture repeats itself"
    assert (top_T2[:, 0] - top_T2[:, 1]).min() > 1e-3, "the fixture comes too close to a tie"
    return Golden(folder, tuple(prompt[0].tolist()), tokens, scores_TV[0])


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory):
    """Golden answers by family, made at first use."""
    made: dict[Family, Golden] = {}

    def get(family: Family) -> Golden:
        if family not in made:
            made[family] = make_golden(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get
