"""Writes quantized checkpoints, in the layouts of the tools that quantize.

Each writer also returns the weights that the stored numbers represent, computed from the numbers before packing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
Writer = Callable[[str, Tensor], tuple[Stored, Tensor]]
"""From the name and the weight of a matrix, the stored tensors and the weight that they represent, in float32."""
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def is_matrix(name: str) -> bool:
    return name.endswith("proj.weight")


def is_experts(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def fp8(block: tuple[int, int] | None, scale_name: str = "weight_scale_inv") -> Writer:
    """Blocks of this size, whose last ones may be smaller; None: a scale for the whole matrix."""

    def write(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = weight.shape
        height, width = block or (rows, columns)
        scale = torch.empty(-(-rows // height), -(-columns // width))
        numbers, found = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                here = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scale[i, j] = weight[here].abs().max() / 448
                numbers[here] = (weight[here] / scale[i, j]).to(torch.float8_e4m3fn)
                found[here] = numbers[here].to(torch.float32) * scale[i, j]
        stored_scale = scale.reshape(1) if block is None else scale
        return {name: numbers, name.replace("weight", scale_name): stored_scale}, found

    return write


def int8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scale).round().clamp(-128, 127)
    return {name: numbers.to(torch.int8), f"{name}_scale": scale}, numbers * scale


def mxfp4(name: str, weight_EIO: Tensor) -> tuple[Stored, Tensor]:
    """Experts of gpt-oss."""
    transposed = weight_EIO.transpose(1, 2).contiguous()
    codes, exponents, numbers = _fp4(transposed.unflatten(-1, (-1, 32)))
    return (
        {f"{name}_blocks": codes[..., ::2] | (codes[..., 1::2] << 4), f"{name}_scales": exponents},
        numbers.flatten(2).transpose(1, 2),
    )


def nvfp4(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    divisor = torch.tensor([2.0 * 448 / float(weight.abs().max())])
    groups = weight.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 * divisor).clamp(min=2**-9).to(torch.float8_e4m3fn)
    factor = (scale.to(torch.float32) / divisor)[..., None]
    codes = _nearest(groups / factor)
    numbers = _values(codes) * factor
    packed = (codes[..., ::2] | (codes[..., 1::2] << 4)).flatten(1)
    stored = {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_global_scale": divisor}
    return stored, numbers.flatten(1)


def packed_integers(num_bits: int, group: int, *, is_symmetric: bool, is_shuffled: bool = False) -> Writer:
    """compressed-tensors."""

    def write(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        columns = weight.shape[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(1)) if is_shuffled else None
        groups = torch.arange(columns) // group
        groups = groups if order is None else groups[order]
        codes, scale, zero, found = _integers(weight, groups, num_bits, is_symmetric=is_symmetric)
        stored = {
            f"{name}_packed": _packed(codes, num_bits, 1),
            f"{name}_scale": scale,
            f"{name}_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            stored[f"{name}_zero_point"] = _packed(zero, num_bits, 0)
        if is_shuffled:
            stored[f"{name}_g_idx"] = groups.to(torch.int32)
        return stored, found

    return write


def gptq(group: int, *, is_shuffled: bool = False, num_bits: int = 4) -> Writer:
    def write(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        columns = weight.shape[1]
        groups = torch.arange(columns) // group
        if is_shuffled:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(2))]
        codes, scale, zero, found = _integers(weight, groups, num_bits, is_symmetric=False)
        parent = name.removesuffix("weight")
        return {
            f"{parent}qweight": _packed(codes.T, num_bits, 0),
            f"{parent}qzeros": _packed((zero - 1).T & ((1 << num_bits) - 1), num_bits, 1),
            f"{parent}scales": scale.T.contiguous(),
            f"{parent}g_idx": groups.to(torch.int32),
        }, found

    return write


def awq(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    codes, scale, zero, found = _integers(weight, torch.arange(weight.shape[1]) // 32, 4, is_symmetric=False)
    parent, order = name.removesuffix("weight"), [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(numbers: Tensor) -> Tensor:
        return _packed(numbers.unflatten(1, (-1, 8))[..., order].flatten(1), 4, 1)

    return {
        f"{parent}qweight": packed(codes.T),
        f"{parent}qzeros": packed(zero.T),
        f"{parent}scales": scale.T.contiguous(),
    }, found


def quantize(folder: Path, settings: dict[str, Any], write: Writer, is_quantized: Callable[[str], bool]) -> Stored:
    """Quantizes a checkpoint in place, and returns all weights that it then represents."""
    file, represented, stored = folder / "model.safetensors", dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(file).items():
        represented[name] = weight
        if is_quantized(name):
            tensors, represented[name] = write(name, weight)
            stored |= {each: tensor.contiguous() for each, tensor in tensors.items()}
        else:
            stored[name] = weight
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return {name: weight.contiguous() for name, weight in represented.items()}


def _fp4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, biased exponents, and the numbers that they represent."""
    exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(1e-9) / 6)) + 1
    factor = torch.exp2(exponents)[..., None]
    codes = _nearest(groups / factor)
    return codes, (exponents + 127).to(torch.uint8), _values(codes) * factor


def _nearest(numbers: Tensor) -> Tensor:
    codes = (numbers.abs()[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    return torch.where(numbers < 0, codes | 8, codes)


def _values(codes: Tensor) -> Tensor:
    values = FP4[(codes & 7).long()]
    return torch.where(codes >= 8, -values, values)


def _integers(
    weight: Tensor, groups: Tensor, num_bits: int, *, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes from 0, scales [outputs, groups], zero points of the same shape, and the numbers that they represent."""
    top, num_groups = (1 << num_bits) - 1, int(groups.max()) + 1
    scale, zero = torch.empty(len(weight), num_groups), torch.empty(len(weight), num_groups, dtype=torch.int32)
    for group in range(num_groups):
        own = weight[:, groups == group]
        if is_symmetric:
            scale[:, group], zero[:, group] = own.abs().amax(1) / (top // 2), top // 2 + 1
        else:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scale[:, group] = (high - low) / top
            zero[:, group] = (-low / scale[:, group]).round().clamp(1, top).to(torch.int32)
    codes = ((weight / scale[:, groups]).round() + zero[:, groups]).clamp(0, top).to(torch.int32)
    return codes, scale, zero, (codes - zero[:, groups]).to(torch.float32) * scale[:, groups]


def _packed(codes: Tensor, num_bits: int, dim: int) -> Tensor:
    """Words of 32 bits along a dim, the first code in the lowest bits."""
    per_word = 32 // num_bits
    columns = codes if dim == 1 else codes.T
    size = columns.shape[1]
    words = torch.zeros(len(columns), -(-size // per_word), dtype=torch.int64)
    for position in range(size):
        words[:, position // per_word] |= columns[:, position].to(torch.int64) << (num_bits * (position % per_word))
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return signed if dim == 1 else signed.T.contiguous()
