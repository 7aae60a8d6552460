"""A second reader of AWQ, GPTQ and NVFP4 layers, in plain numpy, that shares no code with the reader of the product.

It was written from the public descriptions of the formats, before its author read the product's reader:

- AWQ: `dequantize_gemm` in `awq/utils/packing_utils.py` of AutoAWQ (casper-hansen/AutoAWQ), and `awq_dequantize_torch`
  in `tests/kernels/quantization/test_awq_triton.py` of vLLM.
- GPTQ: `QuantLinear.pack` and `QuantLinear.forward` in `auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py` of AutoGPTQ;
  `gptqmodel/nn_modules/qlinear/torch.py` of GPTQModel for the order of inputs (`g_idx`); vllm-project/vllm#26092 for
  the two conventions of zero points, `gptq` and `gptq_v2`.
- NVFP4: `modelopt/torch/quantization/qtensor/nvfp4_tensor.py` of NVIDIA's Model-Optimizer, and `dequantize_to_dtype` in
  `vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py`. compressed-tensors stores the reciprocal of
  Model-Optimizer's second scale, and vLLM inverts it (`compressed_tensors_w4a16_nvfp4.py`).
- The file: the README of huggingface/safetensors. E4M3: "FP8 Formats for Deep Learning", arXiv 2209.05433, table 1.

All functions return weights [out_features, in_features] in float32. Each weight is one product of an integer or an E2M1
number with its scale.
"""

import json
from pathlib import Path

import numpy as np

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of two exponent bits and one mantissa bit, in the order of their codes."""
NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns all tensors of a file. BF16 and F8_E4M3, which numpy does not have, are returned in float32."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors: dict[str, np.ndarray] = {}
    for name, entry in json.loads(content[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        stored = content[start + first : start + last]
        if entry["dtype"] == "BF16":
            flat = (np.frombuffer(stored, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F8_E4M3":
            flat = e4m3_to_float32(np.frombuffer(stored, np.uint8))
        else:
            flat = np.frombuffer(stored, NUMPY_TYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def e4m3_to_float32(codes: np.ndarray) -> np.ndarray:
    """Decodes E4M3: bias 7, subnormal numbers, no infinities, NaN where all bits but the sign are set."""
    exponent = (codes >> 3 & 0xF).astype(np.int32)
    mantissa = (codes & 0x7).astype(np.float32)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    magnitude = np.where(codes & 0x7F == 0x7F, np.nan, magnitude)
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds finite float32 numbers to bfloat16, ties to even, and returns them in float32."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + (bits >> 16 & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Splits 32-bit words into fields, lowest first: [..., words] becomes [..., words, fields of a word]."""
    unsigned = words.view(np.uint32) if words.dtype == np.int32 else words.astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (unsigned[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.int64)


def dequantize_awq(tensors: dict[str, np.ndarray], layer: str, group_size: int) -> np.ndarray:
    """Dequantizes a layer of AWQ (version `gemm`, 4 bits).

    A word holds eight neighbouring outputs of one input: outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest four bits to
    the highest. Zero points are packed in the same way, [groups, out_features / 8]; scales are [groups, out_features].
    """
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def unpack(words_RW: np.ndarray) -> np.ndarray:
        stored_RWF = _fields(words_RW, 4)
        numbers_RWF = np.empty_like(stored_RWF)
        for place, output in enumerate(order):
            numbers_RWF[:, :, output] = stored_RWF[:, :, place]
        return numbers_RWF.reshape(len(words_RW), -1)

    numbers_IN = unpack(tensors[f"{layer}.qweight"])
    zeros_GN = unpack(tensors[f"{layer}.qzeros"])
    scales_GN = tensors[f"{layer}.scales"].astype(np.float32)
    weight_IN = np.empty(numbers_IN.shape, np.float32)
    size = len(numbers_IN) if group_size == -1 else group_size
    for row in range(len(numbers_IN)):
        group = row // size
        weight_IN[row] = (numbers_IN[row] - zeros_GN[group]).astype(np.float32) * scales_GN[group]
    return np.ascontiguousarray(weight_IN.T)


def dequantize_gptq(
    tensors: dict[str, np.ndarray], layer: str, bits: int, group_size: int, zeros_minus_one: bool = True
) -> np.ndarray:
    """Dequantizes a layer of GPTQ with 2, 4 or 8 bits.

    A word holds neighbouring inputs of one output, [in_features * bits / 32, out_features]; words of zero points hold
    neighbouring outputs of a group. `g_idx` gives the group of each input; without it, groups are consecutive inputs.
    `checkpoint_format: gptq` stores each zero point minus one (`zeros_minus_one`), modulo 2**bits; `gptq_v2` stores it.
    """
    numbers_WNF = _fields(tensors[f"{layer}.qweight"], bits)
    numbers_IN = numbers_WNF.transpose(0, 2, 1).reshape(-1, numbers_WNF.shape[1])
    zeros_GWF = _fields(tensors[f"{layer}.qzeros"], bits)
    zeros_GN = zeros_GWF.reshape(len(zeros_GWF), -1)
    if zeros_minus_one:
        zeros_GN = (zeros_GN + 1) % (1 << bits)
    scales_GN = tensors[f"{layer}.scales"].astype(np.float32)
    size = len(numbers_IN) if group_size == -1 else group_size
    groups_I = tensors.get(f"{layer}.g_idx", np.arange(len(numbers_IN)) // size)
    weight_IN = np.empty(numbers_IN.shape, np.float32)
    for row, group in enumerate(groups_I):
        weight_IN[row] = scales_GN[group] * (numbers_IN[row] - zeros_GN[group]).astype(np.float32)
    return np.ascontiguousarray(weight_IN.T)


def dequantize_nvfp4(tensors: dict[str, np.ndarray], layer: str) -> np.ndarray:
    """Dequantizes a layer of NVFP4: E2M1 numbers, two per byte, the first in the low four bits; blocks of 16 inputs.

    The scale of a block is E4M3 (`weight_scale` [out_features, in_features / 16]). It is first multiplied by the scale
    of the tensor (`weight_scale_2` of Model-Optimizer), or divided by its reciprocal (`weight_global_scale` of
    compressed-tensors), in float32.
    """
    packed_NB = tensors[f"{layer}.weight_packed" if f"{layer}.weight_packed" in tensors else f"{layer}.weight"]
    codes_NI = np.empty((packed_NB.shape[0], 2 * packed_NB.shape[1]), np.uint8)
    codes_NI[:, 0::2] = packed_NB & 0xF
    codes_NI[:, 1::2] = packed_NB >> 4
    magnitudes_NI = np.array(E2M1_MAGNITUDES, np.float32)[codes_NI & 0x7]
    numbers_NI = np.where(codes_NI & 0x8, -magnitudes_NI, magnitudes_NI)
    scales_NB = tensors[f"{layer}.weight_scale"].astype(np.float32)
    if f"{layer}.weight_scale_2" in tensors:
        scales_NB = scales_NB * tensors[f"{layer}.weight_scale_2"].astype(np.float32).reshape(())
    else:
        scales_NB = scales_NB / tensors[f"{layer}.weight_global_scale"].astype(np.float32).reshape(())
    return numbers_NI * np.repeat(scales_NB, 16, axis=1)
