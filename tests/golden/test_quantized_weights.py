"""Quantized checkpoints are dequantized while they are read: the weights equal those that the stored numbers represent,
whole and by shares.
"""

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from longleaf.errors import ModelRefused
from tests.support import quantized
from tests.support.quantized import Writer, is_experts, is_matrix, quantize
from workers.model.model import load
from workers.model.quantized_weights import DequantizedTensor, dequantize
from workers.model.sharded_model import load_share
from workers.model.weight_reader import WeightReader, open_weights, quantized_layouts
from workers.model.weight_shares import Share
from zoo.checkpoints import make_checkpoint
from zoo.families import Family

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
LAYOUTS: dict[str, tuple[Family, dict[str, Any], Writer]] = {
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
    files, weights = checkpoint_of(layout)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return dict(weights)


@cache
def checkpoint_of(layout: str) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
    """The files of a checkpoint of a layout, and the weights that it represents."""
    family, settings, write = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name), family, num_layers=2)
        weights = quantize(folder, settings, write, is_experts if layout == "mxfp4" else is_matrix)
        return {file.name: file.read_bytes() for file in folder.iterdir()}, weights


def read(folder: Path, settings: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """All weights."""
    with open_weights(folder) as (stored, _):
        return {name: tensor[...] for name, tensor in dequantize(stored, settings, dtype).items()}


def read_slices(folder: Path, settings: dict[str, Any], dim: int, index: int, count: int) -> dict[str, torch.Tensor]:
    """A slice of each quantized weight that has this dim."""
    found = dict[str, torch.Tensor]()
    with open_weights(folder) as (stored, _):
        for name, tensor in dequantize(stored, settings, torch.float32).items():
            if isinstance(tensor, DequantizedTensor) and dim < len(tensor.get_shape()):
                size = tensor.get_shape()[dim]
                found[name] = tensor.restricted_to(dim, [(size * index // count, size * (index + 1) // count)])[...]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_that_the_numbers_represent(tmp_path: Path, layout: str) -> None:
    expected = make(tmp_path, layout)
    found = read(tmp_path, LAYOUTS[layout][1])
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.sampled(14)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [3, 7])
def test_slices_are_those_of_the_whole_weight(tmp_path: Path, layout: str, count: int) -> None:
    expected = make(tmp_path, layout)
    for dim in range(3 if layout == "mxfp4" else 2):
        shares = [read_slices(tmp_path, LAYOUTS[layout][1], dim, index, count) for index in range(count)]
        assert shares[0]
        for name in shares[0]:
            assert torch.equal(torch.cat([share[name] for share in shares], dim=dim), expected[name]), (name, dim)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_model_has_the_dequantized_weights(tmp_path: Path, layout: str) -> None:
    plain = tmp_path / "plain"
    make_checkpoint(plain, LAYOUTS[layout][0], num_layers=2)
    expected = make(tmp_path / "quantized", layout)
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    wanted = load(str(plain), "float32", "cpu").module.state_dict()
    loaded = load(str(tmp_path / "quantized"), "float32", "cpu")
    assert len(loaded.layouts) == 1
    found = loaded.module.state_dict()
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


def rewritten(folder: Path, settings: dict[str, Any] | None) -> None:
    """Replaces the quantization of a config; None: removes it."""
    content = json.loads((folder / "config.json").read_text())
    del content["quantization_config"]
    added = {} if settings is None else {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(content | added))


def stating(**weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors that states settings of its weights."""
    return COMPRESSED | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def test_blocks_that_do_not_divide_a_weight_have_the_stated_size(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_layers=1)
    stated = stating(block_structure=[128, 40])
    expected = quantize(tmp_path, stated, quantized.fp8((128, 40), "weight_scale"), is_matrix)
    found = read(tmp_path, stated)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    for settings, words in (
        (COMPRESSED, "a size that the config does not state"),
        (stating(block_structure=[32, 40]), "32x40 each"),
        (stated | {"quant_method": "fp8"}, "a size that the config does not state"),
    ):
        rewritten(tmp_path, settings)
        with pytest.raises(ModelRefused, match=words):
            load(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("int4 in groups of 32", stating(group_size=128)),
        ("awq", LAYOUTS["awq"][1] | {"group_size": 128}),
    ],
)
def test_groups_have_the_stated_size(tmp_path: Path, layout: str, settings: dict[str, Any]) -> None:
    make(tmp_path, layout)
    rewritten(tmp_path, settings)
    with pytest.raises(ModelRefused, match="groups of 128"):
        load(str(tmp_path), "float32", "cpu")


def test_nvfp4_of_modelopt_equals_that_of_compressed_tensors(tmp_path: Path) -> None:
    expected = make(tmp_path, "nvfp4")
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith("_packed")]:
        weight = name.removesuffix("_packed")
        stored[weight] = stored.pop(name)
        stored[f"{weight}_scale_2"] = 1 / stored.pop(f"{weight}_global_scale")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    found = read(tmp_path, {"quant_method": "modelopt"})
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=0)  # a factor and its inverse are rounded


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["fp8 32x16", "fp8 by channel", "mxfp4", "nvfp4", "int4 with zero points", "awq"])
def test_each_rank_has_its_share_of_the_dequantized_weights(tmp_path: Path, layout: str) -> None:
    plain = tmp_path / "plain"
    make_checkpoint(plain, LAYOUTS[layout][0], num_layers=2)
    expected = make(tmp_path / "quantized", layout)
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    for index in range(3):
        wanted = load_share(str(plain), "float32", "cpu", Share.even(index, 3))
        found = load_share(str(tmp_path / "quantized"), "float32", "cpu", Share.even(index, 3))
        assert found.num_bytes_read < wanted.num_bytes_read
        assert (len(found.model.layouts), len(wanted.model.layouts)) == (1, 0)
        for one, other in zip(found.model.module.parameters(), wanted.model.module.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("layout", ["fp8 24x40, cut at the end", "mxfp4", "gptq with act-order"])
def test_rank_reads_parts_of_quantized_weights_after_a_loss(tmp_path: Path, layout: str) -> None:
    plain = tmp_path / "plain"
    make_checkpoint(plain, LAYOUTS[layout][0], num_layers=2)
    expected = make(tmp_path / "quantized", layout)
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    found = load_share(str(tmp_path / "quantized"), "float32", "cpu", Share.even(0, 3))
    parts = (*Share.even(0, 3).parts, *Share.even(1, 3).parts[::2])
    assert found.weights.hold(parts) > 0
    wanted = load_share(str(plain), "float32", "cpu", Share(tuple(sorted(parts)), 3))
    for one, other in zip(found.weights.parameters, wanted.weights.parameters, strict=True):
        assert torch.equal(one, other)


def test_fp8_equals_the_dequantization_of_transformers(tmp_path: Path) -> None:
    make(tmp_path, "fp8 32x16")
    stored, found = load_file(tmp_path / "model.safetensors"), read(tmp_path, FP8, dtype=torch.bfloat16)
    operation = Fp8Dequantize(None)
    scales = [name for name in stored if name.endswith("_scale_inv")]
    assert scales
    for name in scales:
        weight = name.removesuffix("_scale_inv")
        assert torch.equal(found[weight], operation._dequantize_one(stored[weight], stored[name], torch.bfloat16))


def test_mxfp4_equals_the_dequantization_of_transformers(tmp_path: Path) -> None:
    make(tmp_path, "mxfp4")
    stored = load_file(tmp_path / "model.safetensors")
    found = read(tmp_path, LAYOUTS["mxfp4"][1], dtype=torch.bfloat16)
    blocks = [name for name in stored if name.endswith("_blocks")]
    assert blocks
    for name in blocks:
        weight = name.removesuffix("_blocks")
        assert torch.equal(found[weight], convert_moe_packed_tensors(stored[name], stored[f"{weight}_scales"]))


def damaged(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces or removes a stored tensor."""
    stored = load_file(folder / "model.safetensors")
    assert name in stored
    del stored[name]
    save_file(stored | ({name: tensor} if tensor is not None else {}), folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("layout", "name", "tensor", "words"),
    [
        ("fp8 32x16", f"{UP}.weight_scale_inv", torch.ones(6, 3), "have the shape [6, 3] for a weight of [192, 64]"),
        ("fp8 32x16", f"{UP}.weight_scale_inv", torch.full((6, 4), torch.nan), "is not finite"),
        ("fp8 32x16", f"{UP}.weight_scale_inv", torch.full((6, 4), torch.inf), "is not finite"),
        ("fp8 32x16", f"{UP}.weight_scale_inv", None, "has the type F8_E4M3, and no scales"),
        ("fp8 32x16", f"{UP}.weight", None, "numbers are missing"),
        ("int4 in groups of 32", f"{UP}.weight_shape", torch.tensor([192, 640]), "hold no weight of [192, 640]"),
        ("int4 in groups of 32", f"{UP}.weight_shape", torch.tensor([-192, 64]), "has the shape [-192, 64]"),
        ("int4 in groups of 32", f"{UP}.weight_shape", None, "its shape is missing"),
        ("int4 in groups of 32", f"{UP}.weight_packed", torch.ones(192, 7, dtype=torch.int32), "hold no weight"),
        ("int4 in groups of 32", f"{UP}.weight_scale", torch.ones(192, 3), "scales have the shape [192, 3]"),
        ("int8 in shuffled groups", f"{UP}.weight_g_idx", torch.full((64,), 9), "a group outside of 0 to 3"),
        ("int8 in shuffled groups", f"{UP}.weight_g_idx", torch.ones(63, dtype=torch.int32), "groups have the shape"),
        ("nvfp4", f"{UP}.weight_scale", torch.ones(192, 3), "have the shape [192, 3]"),
        ("nvfp4", f"{UP}.weight_global_scale", torch.zeros(1), "is not finite"),
        ("awq", f"{UP}.qzeros", torch.ones(2, 5, dtype=torch.int32), "zero points have the shape [2, 5]"),
        ("gptq", f"{UP}.scales", None, "its scales are missing"),
        ("gptq", f"{UP}.qweight", torch.ones(8, 192), "its numbers have the type F32"),
        (
            "mxfp4",
            "model.layers.0.mlp.experts.down_proj_scales",
            torch.full((4, 64, 6), 255, dtype=torch.uint8),
            "is not finite",
        ),
    ],
)
def test_damaged_tensor_is_refused_by_name(
    tmp_path: Path, layout: str, name: str, tensor: torch.Tensor | None, words: str
) -> None:
    make(tmp_path, layout)
    damaged(tmp_path, name, tensor)
    with pytest.raises(ModelRefused) as refused:
        load(str(tmp_path), "float32", "cpu")
    assert words in str(refused.value)
    weight = name.removesuffix("_scales") if layout == "mxfp4" else f"{UP}.weight"
    assert weight in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "name", "tensor", "words"),
    [
        ("int8 by channel", "weight_g_idx", torch.zeros(64, dtype=torch.int32), "its groups is not understood"),
        ("int8 by channel", "weight_global_scale", torch.ones(1), "its divisor is not understood"),
        ("int8 by channel", "pre_quant_scale", torch.ones(64), "pre_quant_scale belongs to a quantized layer"),
        ("nvfp4", "weight_scale", torch.ones(192, 4), "its scales have the type F32"),
        ("nvfp4", "weight_global_scale", None, "its global scale is missing"),
        ("gptq", "qzeros", torch.full((2, 24), -1, dtype=torch.int32), "a zero point overflows"),
    ],
)
def test_tensor_that_would_be_ignored_or_is_ambiguous_is_refused(
    tmp_path: Path, layout: str, name: str, tensor: torch.Tensor | None, words: str
) -> None:
    make(tmp_path, layout)
    stored = load_file(tmp_path / "model.safetensors")
    key = f"{UP.removesuffix('.weight')}.{name}"
    stored.pop(key, None)
    save_file(stored | ({key: tensor} if tensor is not None else {}), tmp_path / "model.safetensors", {"format": "pt"})
    for read_weights in (
        lambda: load(str(tmp_path), "float32", "cpu"),
        lambda: load_share(str(tmp_path), "float32", "cpu", Share.even(0, 2)),
    ):
        with pytest.raises(ModelRefused, match=words):
            read_weights()


LAYERS = {"mxfp4": "model.layers.0.mlp.experts.down_proj", "deepseek_v3": "model.layers.0.self_attn.kv_b_proj"}
"""Layers to damage, by layout or family."""


def layer_of(layout: str) -> str:
    return LAYERS.get(layout) or LAYERS.get(LAYOUTS[layout][0]) or "model.layers.0.self_attn.o_proj"


def scale_of(stored: dict[str, torch.Tensor], layout: str) -> str:
    """The name of the scales of the layer."""
    [name] = (
        name
        for name in stored
        if name.startswith(layer_of(layout)) and "scale" in name and not name.endswith("_global_scale")
    )
    return name


def assert_refused(folder: Path, words: str, *, is_unread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole weights and shares are refused, and by headers as well if nothing has to be read."""
    ways = [lambda: load(str(folder), "float32", "cpu"), lambda: load_share(str(folder), "float32", "cpu", HALF)]
    if is_unread:
        settings = json.loads((folder / "config.json").read_text())["quantization_config"]
        ways.append(lambda: quantized_layouts(folder, settings))
        read = WeightReader.read

        def read_shape(reader: WeightReader, descriptor: int, start: int, buffer: memoryview) -> None:
            assert len(buffer) <= 16, "weights were read"
            read(reader, descriptor, start, buffer)

        monkeypatch.setattr(WeightReader, "read", read_shape)
    for attempt in ways:
        with pytest.raises(ModelRefused, match=re.escape(words)):
            attempt()


HALF = Share.even(0, 2)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_a_wrong_shape_are_refused(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, layout)
    stored = load_file(tmp_path / "model.safetensors")
    name = scale_of(stored, layout)
    damaged(tmp_path, name, torch.cat([stored[name], stored[name][:1]]))
    assert_refused(tmp_path, layer_of(layout), is_unread=True, monkeypatch=monkeypatch)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_that_are_not_numbers_are_refused(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, layout)
    stored = load_file(tmp_path / "model.safetensors")
    scale = stored[name := scale_of(stored, layout)]
    scale.view(torch.uint8).flatten()[: scale.itemsize] = 255  # NaN in each type of scales
    damaged(tmp_path, name, scale)
    assert_refused(tmp_path, f"{layer_of(layout)}", is_unread=False, monkeypatch=monkeypatch)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_truncated_file_is_refused(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, layout)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(tmp_path, "bytes before the end of tensor", is_unread=True, monkeypatch=monkeypatch)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_that_disagree_are_refused(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files have the same scales, or the index names scales that no file has."""
    make(tmp_path, layout)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    name = scale_of(stored, layout)
    first = {key: stored[key] for key in sorted(stored)[::2]} | {name: stored[name]}
    second = {key: stored[key] for key in sorted(stored) if key not in first}
    save_file(first, tmp_path / files[0], {"format": "pt"})
    weight_map = {key: files[key not in first] for key in stored}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for content in (second | {name: stored[name]}, second):
        save_file(content, tmp_path / files[1], {"format": "pt"})
        if content is second:
            save_file({key: first[key] for key in first if key != name}, tmp_path / files[0], {"format": "pt"})
        words = f"tensor {name} is in another file as well" if name in content else layer_of(layout)
        assert_refused(tmp_path, words, is_unread=True, monkeypatch=monkeypatch)


def test_numbers_of_8_bits_without_a_quantization_are_refused(tmp_path: Path) -> None:
    """transformers loads them without their scales."""
    make(tmp_path, "fp8 by tensor")
    rewritten(tmp_path, None)
    words = "has the type F8_E4M3, but the config has no quantization_config"
    with pytest.raises(ModelRefused, match=words):
        load(str(tmp_path), "float32", "cpu")
    with pytest.raises(ModelRefused, match=words):
        load_share(str(tmp_path), "float32", "cpu", Share.even(0, 2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "awq", "transform_config": {"config_groups": {}}}, "rotated weights (transform_config)"),
        ({"quant_method": "awq", "bits": 3}, "3 bits per number are not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported"),
        ({"quant_method": "bitsandbytes"}, "the quantization 'bitsandbytes' is not supported: only fp8,"),
        ({"quant_method": "fp8"}, "its numbers have the type I32"),
    ],
)
def test_unknown_quantization_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    make(tmp_path, "awq")
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "quantization_config": settings}))
    with pytest.raises(ModelRefused, match=re.escape(words)):
        load(str(tmp_path), "float32", "cpu")
