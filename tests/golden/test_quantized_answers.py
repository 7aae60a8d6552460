"""Greedy text of quantized models equals that of transformers' `generate` on the dequantized weights, in float32: for
whole and sharded weights, on 1 to 4 ranks, in every state of a context.
"""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.support import quantized
from tests.support.golden.plain import (
    HIDDEN,
    LOGIT_TOLERANCE,
    NEW_TOKENS,
    PROMPT_TOKENS,
    Golden,
    ask_plain,
    draw_ids,
    tokens_with_hidden_keys,
)
from tests.support.golden.states import STATES, Logits, running
from tests.support.quantized import Writer, is_experts, is_matrix, quantize
from tests.support.threads import config_for
from zoo.checkpoints import make_checkpoint
from zoo.families import Family

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}
INT4 = quantized.packed_integers(4, 8, is_symmetric=False)
SYMMETRIC = quantized.packed_integers(4, 16, is_symmetric=True)


def is_mlp(name: str) -> bool:
    """Checkpoints in NVFP4 keep the attention of DeepSeek in 16 bits."""
    return ".mlp." in name and is_matrix(name)


LAYOUTS: dict[str, tuple[Family, dict[str, Any], Writer, Callable[[str], bool]]] = {
    "llama in fp8 blocks": ("llama", FP8, quantized.fp8((32, 16)), is_matrix),
    "qwen3_moe in fp8 blocks": ("qwen3_moe", FP8, quantized.fp8((32, 16)), is_matrix),
    "gpt_oss in mxfp4": ("gpt_oss", {"quant_method": "mxfp4"}, quantized.mxfp4, is_experts),
    "deepseek_v3 in int4": ("deepseek_v3", COMPRESSED, INT4, is_matrix),
    "qwen3_moe in int4": ("qwen3_moe", COMPRESSED, SYMMETRIC, is_matrix),
    "llama in awq": ("llama", AWQ, quantized.awq, is_matrix),
    "llama in gptq": ("llama", GPTQ, quantized.gptq(16, is_shuffled=True), is_matrix),
    "deepseek_v3 in nvfp4": ("deepseek_v3", COMPRESSED, quantized.nvfp4, is_mlp),
}
RANKS = [("whole", 1), *itertools.product(("whole", "sharded"), (2, 3, 4))]
WAYS = itertools.cycle(zip(*map(itertools.cycle, (STATES, ("gather", "exchange", "butterfly"), (64, 300)))))  # noqa: B905
COVER = [
    (layout, weights, world_size, *next(WAYS)) for layout, (weights, world_size) in itertools.product(LAYOUTS, RANKS)
]
"""Each layout on all numbers of ranks with all weights; its 7 rows have all 5 states."""

Goldens = Callable[[str], tuple[Path, Golden]]


@pytest.fixture(scope="module")
def quantized_goldens(tmp_path_factory: pytest.TempPathFactory) -> Goldens:
    """The folder of a quantized checkpoint, and the golden answer of its dequantized weights, by layout."""
    made = dict[str, tuple[Path, Golden]]()

    def get(layout: str) -> tuple[Path, Golden]:
        if layout not in made:
            made[layout] = make(tmp_path_factory.mktemp("quantized"), layout)
        return made[layout]

    return get


def make(folder: Path, layout: str) -> tuple[Path, Golden]:
    """The first weights whose output would reveal an error."""
    family, settings, write, is_quantized = LAYOUTS[layout]
    for seed in range(1, 9):
        own, plain = folder / f"quantized {seed}", folder / f"plain {seed}"
        make_checkpoint(own, family, seed=seed)
        shutil.copytree(own, plain)
        weights = quantize(own, settings, write, is_quantized)
        save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
        golden, least_gap = ask_plain(plain, draw_ids(PROMPT_TOKENS), NEW_TOKENS)
        is_lively = len(set(golden.tokens)) > NEW_TOKENS // 3 and least_gap > 1e-3
        if is_lively and tokens_with_hidden_keys(golden, HIDDEN) != golden.tokens:
            return own, golden
    raise AssertionError(f"{layout}: all weights repeat themselves, come close to ties, or overlook hidden keys")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "weights", "world_size", "state", "merge", "chunk_size"), COVER)
async def test_tokens_equal_generate_on_the_dequantized_weights(
    quantized_goldens: Goldens,
    layout: str,
    weights: str,
    world_size: int,
    state: str,
    merge: str,
    chunk_size: int,
) -> None:
    folder, golden = quantized_goldens(layout)
    settings = {"merge": merge, "chunk_size": chunk_size, "weights": weights}
    logits = Logits()
    async with running(config_for(folder, world_size=world_size, **settings), logits.watch) as engine:
        answers = await STATES[state](engine, golden.prompt)
        assert engine.cluster().dequantization.endswith(" checkpoint, computed in float32")
    assert answers == [golden.tokens] * len(answers)
    difference = (logits.first(NEW_TOKENS) - golden.logits_TV).abs().max()
    assert difference <= LOGIT_TOLERANCE * golden.logits_TV.std()


def test_cover_has_all_states_of_each_layout() -> None:
    for layout in LAYOUTS:
        assert {state for name, _, _, state, *_ in COVER if name == layout} == set(STATES)
