"""Quantized layers are dequantized to the bits that other readers compute: compressed-tensors for its own formats, and
a reader in numpy for AWQ, GPTQ and NVFP4. Whole layers and slices of 1 to 4 ranks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support import numpy_dequantization as numpy_reader
from workers.model import dequantization
from workers.model.quantized_weights import dequantize
from workers.model.weight_reader import open_weights

LAYER = "model.layers.0.mlp.up_proj"
WEIGHT = f"{LAYER}.weight"


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def _code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of dequantization."""
    if request.param == "torch":
        monkeypatch.setattr("workers.model.dequantization._loaded", lambda: None)
    else:
        assert dequantization._loaded() is not None


def slices(size: int) -> Iterator[list[tuple[int, int]]]:
    """The ranges of 1 to 4 ranks, and one range that starts and ends inside of blocks."""
    for count in range(1, 5):
        yield [(size * rank // count, size * (rank + 1) // count) for rank in range(count)]
    yield [(0, size // 3 + 1), (size // 3 + 1, size)]


def assert_reads(
    folder: Path, stored: dict[str, Tensor], settings: dict[str, Any], dtype: torch.dtype, expected: Tensor
) -> None:
    """The reader returns the expected weight, whole and by slices of both dims, with the same bits (zeros may have
    either sign).
    """
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with open_weights(folder) as (tensors, _):
        found = dequantize(tensors, settings, dtype)
        assert found.keys() == {WEIGHT}
        weight = found[WEIGHT]
        assert weight.get_shape() == list(expected.shape)
        assert weight[...].dtype == expected.dtype == dtype
        assert torch.equal(weight[...], expected)
        for dim in range(2):
            for ranges in slices(expected.shape[dim]):
                parts = [weight.restricted_to(dim, [each])[...] for each in ranges]  # type: ignore[attr-defined]
                assert torch.equal(torch.cat(parts, dim), expected), (dim, ranges)


def random_words(seed: int, shape: tuple[int, int], num_bits: int, top: int | None = None) -> Tensor:
    """Words of random integers, each from 0 to `top`."""
    generator = np.random.default_rng(seed)
    fields = generator.integers(0, (1 << num_bits if top is None else top + 1), (*shape, 32 // num_bits), np.uint64)
    shifts = np.arange(0, 32, num_bits, dtype=np.uint64)
    words = (fields << shifts).sum(-1).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def random_scales(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.05 + 1e-3).to(dtype)


def assert_equals_numpy(folder: Path, stored: dict[str, Tensor], settings: dict[str, Any], read: Any) -> None:
    """Compares with a function of the numpy reader, in float32 and in bfloat16."""
    save_file(stored, folder / "model.safetensors")
    expected: np.ndarray = read(numpy_reader.read_safetensors(folder / "model.safetensors"))
    assert_reads(folder, stored, settings, torch.float32, torch.from_numpy(expected))
    rounded = torch.from_numpy(numpy_reader.round_to_bfloat16(expected)).to(torch.bfloat16)
    assert_reads(folder, stored, settings, torch.bfloat16, rounded)


@pytest.mark.parametrize(("inputs", "outputs", "group"), [(64, 48, 32), (128, 24, 128), (96, 40, -1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_awq_equals_the_numpy_reader(tmp_path: Path, inputs: int, outputs: int, group: int, dtype: torch.dtype) -> None:
    num_groups = 1 if group == -1 else inputs // group
    stored = {
        f"{LAYER}.qweight": random_words(1, (inputs, outputs // 8), 4),
        f"{LAYER}.qzeros": random_words(2, (num_groups, outputs // 8), 4),
        f"{LAYER}.scales": random_scales(3, (num_groups, outputs), dtype),
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    assert_equals_numpy(
        tmp_path, stored, settings, lambda tensors: numpy_reader.dequantize_awq(tensors, LAYER, group_size=group)
    )


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("order", ["consecutive groups", "act-order", "without g_idx", "one group"])
def test_gptq_equals_the_numpy_reader(tmp_path: Path, num_bits: int, checkpoint_format: str, order: str) -> None:
    inputs, outputs, group = 96, 40, (96 if order == "one group" else 32)
    per_word, num_groups = 32 // num_bits, inputs // group
    is_v1 = checkpoint_format == "gptq"
    top = (1 << num_bits) - 2 if is_v1 else None  # readers differ if adding one overflows
    stored = {
        f"{LAYER}.qweight": random_words(1, (inputs // per_word, outputs), num_bits),
        f"{LAYER}.qzeros": random_words(2, (num_groups, outputs // per_word), num_bits, top),
        f"{LAYER}.scales": random_scales(3, (num_groups, outputs), torch.float16),
    }
    if order != "without g_idx":
        groups = torch.arange(inputs) // group
        if order == "act-order":
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(4))]
        stored[f"{LAYER}.g_idx"] = groups.to(torch.int32)
    size = -1 if order == "one group" else group
    settings = {"quant_method": "gptq", "bits": num_bits, "group_size": size, "checkpoint_format": checkpoint_format}
    assert_equals_numpy(
        tmp_path,
        stored,
        settings,
        lambda tensors: numpy_reader.dequantize_gptq(tensors, LAYER, num_bits, size, zeros_minus_one=is_v1),
    )


@pytest.mark.parametrize("tool", ["modelopt", "compressed-tensors"])
def test_nvfp4_equals_the_numpy_reader(tmp_path: Path, tool: str) -> None:
    outputs, inputs = 40, 96
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (outputs, inputs // 16), generator=generator, dtype=torch.uint8)
    scales = torch.where(codes & 0x7F == 0x7F, 0, codes).view(torch.float8_e4m3fn)  # any number but NaN
    packed = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    stored = {f"{LAYER}.weight_scale": scales}
    if tool == "modelopt":
        stored |= {WEIGHT: packed, f"{LAYER}.weight_scale_2": torch.tensor(1.234e-4)}
        stored[f"{LAYER}.input_scale"] = torch.tensor(0.5)
    else:
        stored |= {f"{LAYER}.weight_packed": packed, f"{LAYER}.weight_global_scale": torch.tensor([8123.4])}
    assert_equals_numpy(
        tmp_path,
        stored,
        {"quant_method": tool},
        lambda tensors: numpy_reader.dequantize_nvfp4(tensors, LAYER),
    )


def test_numpy_reader_decodes_all_numbers_of_8_bits_as_torch_does() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32)
    found = torch.from_numpy(numpy_reader.e4m3_to_float32(codes))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


SCHEMES: dict[str, dict[str, Any]] = {
    "int4 in groups": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "int4 in groups with zero points": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    "int4 by channel": {"num_bits": 4, "strategy": "channel"},
    "int4 by channel with zero points": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "int8 in groups": {"num_bits": 8, "strategy": "group", "group_size": 48},
    "int8 by channel with zero points": {"num_bits": 8, "strategy": "channel", "symmetric": False},
}
"""Packed integers of compressed-tensors."""
NUMBERS: dict[str, dict[str, Any]] = {
    "int8 by channel": {"num_bits": 8, "strategy": "channel"},
    "int8 by channel with zero points": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "fp8 by tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 by channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 in blocks": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    "fp8 in blocks, cut at the end": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 40]},
}
"""Numbers of 8 bits of compressed-tensors, which are not packed."""
SHAPE = 40, 96
"""Outputs and inputs. No word, group or block divides a third of them."""


def compress_layer(scheme: dict[str, Any], file_format: str, dtype: torch.dtype, *, seed: int) -> dict[str, Tensor]:
    """The stored tensors of a layer as compressed-tensors writes them, with scales in `dtype`."""
    outputs, inputs = SHAPE
    weights = scheme_of(scheme)
    match scheme["strategy"]:
        case "tensor":
            scales: tuple[int, ...] = (1,)
        case "channel":
            scales = outputs, 1
        case "block":
            height, width = scheme["block_structure"]
            scales = -(-outputs // height), -(-inputs // width)
        case _:
            scales = outputs, inputs // scheme["group_size"]
    generator = torch.Generator().manual_seed(seed)
    state = {
        "weight": torch.randn(SHAPE, generator=generator, dtype=torch.float32).to(dtype),
        "weight_scale": random_scales(seed, scales, dtype) * (8 if scheme["num_bits"] == 4 else 1),
    }
    if not scheme.get("symmetric", True):
        half = 1 << (scheme["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-half, half, scales, generator=generator, dtype=torch.int8)
    return {f"{LAYER}.{name}": tensor for name, tensor in compressor(file_format).compress(state, weights).items()}


def package(module: str) -> Any:
    """A module of compressed-tensors, without which the test is skipped."""
    return pytest.importorskip(f"compressed_tensors.{module}", reason="compressed-tensors is not installed")


def scheme_of(scheme: dict[str, Any]) -> Any:
    module = package("quantization")
    return module.QuantizationScheme(targets=["Linear"], weights=module.QuantizationArgs(**scheme))


def compressor(file_format: str) -> Any:
    return package("compressors").BaseCompressor.get_value_from_registry(file_format)


def weight_of_package(stored: dict[str, Tensor], scheme: dict[str, Any], file_format: str) -> Tensor:
    """The weight of stored tensors according to compressed-tensors, in the dtype of the scales."""
    local = {name.removeprefix(f"{LAYER}."): tensor for name, tensor in stored.items()}
    return compressor(file_format).decompress(local, scheme_of(scheme))["weight"]


def settings_of(scheme: dict[str, Any], file_format: str) -> dict[str, Any]:
    """The description of a quantization as compressed-tensors writes it into a config."""
    group = scheme_of(scheme).model_dump()
    return {"quant_method": "compressed-tensors", "format": file_format, "config_groups": {"group_0": group}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_packed_integers_equal_those_of_compressed_tensors(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    scheme = SCHEMES[name]
    stored = compress_layer(scheme, "pack-quantized", dtype, seed=6)
    assert f"{LAYER}.weight_packed" in stored
    assert (f"{LAYER}.weight_zero_point" in stored) == (not scheme.get("symmetric", True))
    expected = weight_of_package(stored, scheme, "pack-quantized")
    assert_reads(tmp_path, stored, settings_of(scheme, "pack-quantized"), dtype, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_8_bits_equal_those_of_compressed_tensors(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    scheme, file_format = NUMBERS[name], "int-quantized" if name.startswith("int8") else "float-quantized"
    stored = compress_layer(scheme, file_format, dtype, seed=7)
    expected = weight_of_package(stored, scheme, file_format)
    assert_reads(tmp_path, stored, settings_of(scheme, file_format), dtype, expected)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_shuffled_groups_equal_those_of_compressed_tensors(tmp_path: Path, is_symmetric: bool) -> None:
    """Its versions before August 2026 sorted the inputs by group, dequantized, and restored the order (`g_idx`).
    Later ones refuse such checkpoints, so the test sorts, with the functions of the package that unpack and pack.
    """
    helpers = package("compressors.pack_quantized.helpers")
    scheme = {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": is_symmetric}
    stored = compress_layer(scheme, "pack-quantized", torch.float32, seed=8)
    groups = (torch.arange(SHAPE[1]) // 16)[torch.randperm(SHAPE[1], generator=torch.Generator().manual_seed(9))]
    order = groups.argsort(stable=True)
    numbers = helpers.unpack_from_int32(stored[f"{LAYER}.weight_packed"], 4, torch.Size(SHAPE))
    in_order = {**stored, f"{LAYER}.weight_packed": helpers.pack_to_int32(numbers[:, order], 4)}
    expected = weight_of_package(in_order, scheme, "pack-quantized")[:, order.argsort()]
    settings = settings_of(scheme, "pack-quantized")
    assert_reads(
        tmp_path, {**stored, f"{LAYER}.weight_g_idx": groups.to(torch.int32)}, settings, torch.float32, expected
    )


def test_fp4_equals_that_of_compressed_tensors(tmp_path: Path) -> None:
    """It returns bfloat16."""
    outputs, inputs = SHAPE
    generator = torch.Generator().manual_seed(10)
    for file_format, group in (("nvfp4-pack-quantized", 16), ("mxfp4-pack-quantized", 32)):
        is_nvfp4 = group == 16
        strategy = "tensor_group" if is_nvfp4 else "group"
        scheme = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group}
        codes = torch.randint(96, 126, (outputs, inputs // group), generator=generator, dtype=torch.uint8)
        packed = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
        stored = {f"{LAYER}.weight_packed": packed, f"{LAYER}.weight_scale": codes}
        if is_nvfp4:
            stored[f"{LAYER}.weight_scale"] = codes.view(torch.float8_e4m3fn)
            stored[f"{LAYER}.weight_global_scale"] = torch.tensor([8123.4])
        expected = weight_of_package(stored, scheme, file_format).to(torch.bfloat16)
        assert_reads(tmp_path, stored, settings_of(scheme, file_format), torch.bfloat16, expected)
