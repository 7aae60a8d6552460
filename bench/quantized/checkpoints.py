"""Random checkpoints in quantized layouts: the numbers of each layout are drawn, not rounded from weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from zoo.checkpoints import make_checkpoint
from zoo.families import Family

STD = 0.02
"""About the standard deviation of the weights."""
PLAIN = "bf16"
Stored = dict[str, Tensor]
LLAMA: dict[str, Any] = {"num_layers": 8, "hidden": 1280, "num_heads": 10, "num_kv_heads": 2, "ffn": 3584}
EXPERTS: dict[str, Any] = {"num_layers": 8, "hidden": 1024, "num_heads": 8, "num_kv_heads": 2, "ffn": 1024}


def _words(rows: int, columns: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int64).to(torch.int32)


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _fp8(weight: str, rows: int, columns: int) -> Stored:
    codes = _bytes(rows, columns)
    codes &= 0xBF  # below 2
    scale = torch.full((math.ceil(rows / 128), math.ceil(columns / 128)), STD)
    return {weight: codes.view(torch.float8_e4m3fn), f"{weight}_scale_inv": scale}


def _int4(weight: str, rows: int, columns: int) -> Stored:
    return {
        f"{weight}_packed": _words(rows, columns // 8),
        f"{weight}_scale": torch.full((rows, columns // 32), STD / 5, dtype=torch.bfloat16),
        f"{weight}_shape": torch.tensor([rows, columns]),
    }


def _nvfp4(weight: str, rows: int, columns: int) -> Stored:
    return {
        f"{weight}_packed": _bytes(rows, columns // 2),
        f"{weight}_scale": torch.full((rows, columns // 16), 128.0).to(torch.float8_e4m3fn),
        f"{weight}_global_scale": torch.tensor([128 * 3 / STD]),
    }


def _awq(weight: str, rows: int, columns: int) -> Stored:
    layer = weight.removesuffix(".weight")
    return {
        f"{layer}.qweight": _words(columns, rows // 8),
        f"{layer}.qzeros": _words(columns // 128, rows // 8),
        f"{layer}.scales": torch.full((columns // 128, rows), STD / 7, dtype=torch.float16),
    }


def _gptq(weight: str, rows: int, columns: int) -> Stored:
    layer = weight.removesuffix(".weight")
    return {
        f"{layer}.qweight": _words(columns // 8, rows),
        f"{layer}.qzeros": torch.full((columns // 128, rows // 8), 0x77777777, dtype=torch.int32),
        f"{layer}.scales": torch.full((columns // 128, rows), STD / 5, dtype=torch.float16),
        f"{layer}.g_idx": (torch.arange(columns) // 128).to(torch.int32),
    }


def _mxfp4(weight: str, experts: int, inputs: int, outputs: int) -> Stored:
    return {
        f"{weight}_blocks": _bytes(experts, outputs, inputs // 32, 16),
        f"{weight}_scales": torch.full((experts, outputs, inputs // 32), 127 - 7, dtype=torch.uint8),
    }


LAYOUTS: dict[str, tuple[Family, dict[str, Any], Callable[..., Stored]]] = {
    "fp8": ("llama", {"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4"}, _mxfp4),
    "nvfp4": ("llama", {"quant_method": "compressed-tensors"}, _nvfp4),
    "int4": ("llama", {"quant_method": "compressed-tensors"}, _int4),
    "awq": ("llama", {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, _awq),
    "gptq": ("llama", {"quant_method": "gptq", "bits": 4, "group_size": 128}, _gptq),
}


def make_pair(folder: Path, layout: str) -> tuple[Path, Path, int]:
    """Writes a checkpoint in bfloat16 and one of the layout with the same shapes. Returns their folders, and the number
    of parameters.
    """
    family, settings, draw = LAYOUTS[layout]
    shape = EXPERTS if family == "gpt_oss" else LLAMA
    plain, own = folder / PLAIN, folder / layout
    make_checkpoint(own, family, initializer_range=STD, **shape)
    torch.manual_seed(1)
    weights = load_file(own / "model.safetensors")
    stored = Stored()
    for name, weight in weights.items():
        is_quantized = "experts." in name and weight.ndim == 3 if family == "gpt_oss" else name.endswith("proj.weight")
        stored |= draw(name, *weight.shape) if is_quantized else {name: weight.to(torch.bfloat16)}
    config = {**json.loads((own / "config.json").read_text()), "dtype": "bfloat16"}
    plain.mkdir()
    for path, tensors, described in (
        (plain, {name: weight.to(torch.bfloat16) for name, weight in weights.items()}, config),
        (own, stored, {**config, "quantization_config": settings}),
    ):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(described))
    return plain, own, sum(weight.numel() for weight in weights.values())
