"""Quantized checkpoints are dequantized while they are read: the weights equal those that the stored numbers represent,
whole and by shares.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import quantized
from tests.support.quantized import Writer, is_experts, is_matrix, quantize
from workers.model.model import load
from workers.model.quantized_weights import DequantizedTensor, dequantize
from workers.model.weight_reader import open_weights
from zoo.checkpoints import make_checkpoint

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any], Writer]] = {
    "fp8 32x16": ("llama", FP8, quantized.fp8((32, 16))),
    "fp8 24x40, cut at the end": ("llama", {**FP8, "weight_block_size": [24, 40]}, quantized.fp8((24, 40))),
    "fp8 by channel": ("qwen3_moe", COMPRESSED, quantized.fp8((1, 10**6), "weight_scale")),
    "fp8 by tensor": ("llama", COMPRESSED, quantized.fp8(None, "weight_scale")),
    "int8 by channel": ("llama", COMPRESSED, quantized.int8),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4"}, quantized.mxfp4),
    "nvfp4": ("llama", COMPRESSED, quantized.nvfp4),
    "int4 in groups of 32": ("llama", COMPRESSED, quantized.packed_integers(4, 32, is_symmetric=True)),
    "int4 with zero points": ("deepseek_v3", COMPRESSED, quantized.packed_integers(4, 8, is_symmetric=False)),
    "int8 in shuffled groups": (
        "llama",
        COMPRESSED,
        quantized.packed_integers(8, 16, is_symmetric=False, is_shuffled=True),
    ),
    "awq": ("llama", {"quant_method": "awq", "bits": 4, "version": "gemm"}, quantized.awq),
    "gptq": ("llama", GPTQ, quantized.gptq(32)),
    "gptq with act-order": ("llama", GPTQ, quantized.gptq(32, is_shuffled=True)),
    "gptq int8": ("llama", {**GPTQ, "bits": 8}, quantized.gptq(16, num_bits=8)),
}


def make(folder: Path, layout: str) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of a layout, and returns the weights that it represents."""
    family, settings, write = LAYOUTS[layout]
    make_checkpoint(folder, family, num_layers=2)
    return quantize(folder, settings, write, is_experts if layout == "mxfp4" else is_matrix)


def read(folder: Path, settings: dict[str, Any], dim: int | None = None, index: int = 0, count: int = 1) -> dict:
    with open_weights(folder) as (stored, _):
        found = {}
        for name, tensor in dequantize(stored, settings, torch.float32).items():
            if dim is not None:
                size = tensor.get_shape()[dim] if dim < len(tensor.get_shape()) else 0
                if not isinstance(tensor, DequantizedTensor) or not size:
                    continue
                tensor = tensor.restricted_to(dim, [(size * index // count, size * (index + 1) // count)])
            found[name] = tensor[...]
        return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_that_the_numbers_represent(tmp_path: Path, layout: str) -> None:
    expected = make(tmp_path, layout)
    found = read(tmp_path, LAYOUTS[layout][1])
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [3, 7])
def test_slices_are_those_of_the_whole_weight(tmp_path: Path, layout: str, count: int) -> None:
    expected = make(tmp_path, layout)
    for dim in range(3 if layout == "mxfp4" else 2):
        shares = [read(tmp_path, LAYOUTS[layout][1], dim, index, count) for index in range(count)]
        assert shares[0]
        for name in shares[0]:
            assert torch.equal(torch.cat([share[name] for share in shares], dim=dim), expected[name]), (name, dim)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_model_has_the_dequantized_weights(tmp_path: Path, layout: str) -> None:
    from safetensors.torch import save_file

    plain = tmp_path / "plain"
    make_checkpoint(plain, LAYOUTS[layout][0], num_layers=2)
    expected = make(tmp_path / "quantized", layout)
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    wanted = load(str(plain), "float32", "cpu").module.state_dict()
    found = load(str(tmp_path / "quantized"), "float32", "cpu").module.state_dict()
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name
