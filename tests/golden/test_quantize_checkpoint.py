"""`models convert --to` writes checkpoints that represent the source up to the nearest numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from longleaf.checkpoints.quantization import quantize
from longleaf.config import DtypeName
from longleaf.errors import InvalidArgument, ModelRefused
from workers.model.model import load
from workers.quantize_checkpoint import fp8_block, int4, quantize_checkpoint
from zoo.checkpoints import make_checkpoint
from zoo.families import Family


@pytest.mark.parametrize("kind", ["fp8-block", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_quantized_checkpoint_represents_its_source(tmp_path: Path, family: Family, kind: str) -> None:
    source, folder = make_checkpoint(tmp_path / "source", family, num_layers=2), tmp_path / "quantized"
    report = quantize_checkpoint(source, folder, kind)
    assert not report.reason
    assert report.num_bytes < report.num_source_bytes
    assert {name for name in report.unchanged if "embed" in name or "lm_head" in name} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    plain = load(str(source), "float32", "cpu").module.state_dict()
    found = load(str(folder), "float32", "cpu").module.state_dict()
    assert plain.keys() == found.keys()
    limit = 0.04 if kind == "fp8-block" else 0.13
    names = {layer.name for layer in report.layers}
    for name, weight in plain.items():
        error = (found[name] - weight).norm() / weight.norm()
        assert error <= limit, name
        if name in report.unchanged:
            assert error == 0
    assert all(0 < layer.relative_error <= limit and 0 < layer.largest_error < 0.08 for layer in report.layers)
    assert len(names) == len(report.layers) == (14 if family == "llama" else 32)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_integers_are_the_nearest(group: int) -> None:
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    stored, found = int4("w", weight, group)
    scale = stored["w_scale"].repeat_interleave(group, dim=1)
    assert ((weight - found).abs() <= scale * 0.5 * (1 + 1e-5)).all()
    assert stored["w_packed"].shape == (40, 32) and stored["w_packed"].dtype == torch.int32


def test_blocks_that_are_not_full_and_zeros_are_quantized() -> None:
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] = 0
    stored, found = fp8_block("w", weight)
    assert stored["w_scale_inv"].shape == (2, 2)
    assert torch.equal(found[:128, :128], torch.zeros(128, 128))
    assert ((weight - found).abs() <= weight.abs() * 2**-4 + 1e-4).all()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("fp8-block", FineGrainedFP8Config(dequantize=True)), ("int4", CompressedTensorsConfig(run_compressed=False))],
    ids=["fp8-block", "int4"],
)
def test_other_packages_read_the_same_weights(tmp_path: Path, kind: str, settings: Any, dtype: DtypeName) -> None:
    """transformers dequantizes FP8, compressed-tensors INT4. The former requires whole blocks, and
    returns float32.
    """
    source = make_checkpoint(
        tmp_path / "source", "llama", num_layers=2, hidden=256, num_heads=4, num_kv_heads=2, ffn=384
    )
    report = quantize_checkpoint(source, tmp_path / "quantized", kind)
    assert len(report.layers) == 14
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "quantized", dtype=dtype, quantization_config=settings, local_files_only=True
    )
    expected = model.state_dict()
    found = load(str(tmp_path / "quantized"), dtype, "cpu").module.state_dict()
    for name, weight in found.items():
        assert torch.equal(expected[name].to(weight.dtype), weight), name


def test_sources_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", num_layers=1)
    quantize_checkpoint(source, tmp_path / "once", "int4")
    with pytest.raises(ModelRefused, match="it is quantized"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice", "fp8-block")
    with pytest.raises(InvalidArgument, match="exists"):
        quantize(source, tmp_path / "once", "int4")
    with pytest.raises(ModelRefused, match="cannot be quantized"):
        quantize(tmp_path, tmp_path / "other", "int4")
    assert not (tmp_path / "other").exists()


@pytest.mark.extended
def test_separate_process_writes_the_same_checkpoint(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", num_layers=1)
    assert quantize(source, tmp_path / "by a process", "int4") == quantize_checkpoint(source, tmp_path / "here", "int4")
    written, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("by a process", "here"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_files_and_index_are_those_of_the_source(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", num_layers=1)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names, places = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), dict[str, str]()
    for index, file in enumerate(names):
        some = dict(sorted(weights.items())[index::2])
        save_file(some, source / file, {"format": "pt"})
        places |= dict.fromkeys(some, file)
    index_name = "model.safetensors.index.json"
    (source / index_name).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    quantize_checkpoint(source, tmp_path / "quantized", "int4")
    found = json.loads((tmp_path / "quantized" / index_name).read_text())["weight_map"]
    assert all(found[f"{name}_packed" if f"{name}_packed" in found else name] == file for name, file in places.items())
    assert (tmp_path / "quantized" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    load(str(tmp_path / "quantized"), "float32", "cpu")
