"""Quantizes the linear layers of a checkpoint to 8 or 4 bits, each number to the nearest.

`python -m workers.quantize_checkpoint SOURCE DIR KIND` writes the folder DIR, and prints a QuantizationReport. The
embedding, the head, routers and all that is not a matrix keep their type. Files of the checkpoint are read and written
one at a time; the config describes the layout as transformers and compressed-tensors do.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from longleaf.checkpoints.quantization import LayerError, QuantizationReport
from longleaf.errors import ModelRefused
from longleaf.fingerprint import CONFIG, weight_files
from workers.model import model as models
from workers.model.quantized_weights import pop_quantization
from workers.model.weight_parts import MIN_OUTPUTS, is_experts
from workers.model.weight_reader import targets_of

BLOCK = 128
"""Outputs and inputs per scale of FP8."""
GROUPS = (128, 64, 32)
"""Inputs per scale of INT4: the first that divides all matrices, or else most of them."""
LARGEST_FP8 = 448.0
INT4_STEPS = 7.5
"""Steps from zero to the largest number, as in compressed-tensors: the range is -8 to 7."""
PER_WORD = 8
INDEX = "model.safetensors.index.json"


def main(source: str, folder: str, kind: str) -> QuantizationReport:
    try:
        return quantize_checkpoint(Path(source), Path(folder), kind)
    except ModelRefused as error:
        return QuantizationReport(reason=str(error))
    except Exception as error:  # any error in the files
        return QuantizationReport(reason=models.describe_error(error))


@torch.inference_mode()
def quantize_checkpoint(source: Path, folder: Path, kind: str) -> QuantizationReport:
    """Writes the checkpoint. Raises ModelRefused if the source is quantized, or cannot be served."""
    model_config = models.read_config(str(source))
    if pop_quantization(model_config) is not None:
        raise ModelRefused("it is quantized")
    shapes = _shapes(source)
    chosen = _linear_weights(model_config, shapes)
    group = _group_of(shapes[name] for name in chosen) if kind == "int4" else BLOCK
    unchanged = sorted(name for name, shape in shapes.items() if len(shape) == 2 and name not in chosen)
    if kind == "int4":
        unchanged += [name for name in chosen if shapes[name][1] % group]
        chosen = [name for name in chosen if shapes[name][1] % group == 0]
    if not chosen:
        raise ModelRefused("no linear layer can be quantized")
    layers, places, num_bytes, num_source_bytes = list[LayerError](), dict[str, str](), 0, 0
    folder.mkdir(exist_ok=True)
    for file in weight_files(source):
        stored = dict[str, Tensor]()
        with safe_open(source / file, "pt") as tensors:  # pyright: ignore[reportUnknownVariableType]
            for name in shapes:
                if name not in tensors.keys():  # noqa: SIM118
                    continue
                weight: Tensor = tensors.get_tensor(name)
                num_source_bytes += weight.nbytes
                if name in chosen:
                    found, represented = int4(name, weight, group) if kind == "int4" else fp8_block(name, weight)
                    layers.append(_error(name, weight.float(), represented))
                    stored |= found
                else:
                    stored[name] = weight
        save_file(stored, folder / file, metadata={"format": "pt"})
        (folder / file).chmod((source / CONFIG).stat().st_mode)
        places |= dict.fromkeys(stored, file)
        num_bytes += sum(tensor.nbytes for tensor in stored.values())
    _copy_others(source, folder)
    settings = _int4_settings(group, unchanged) if kind == "int4" else _fp8_settings(unchanged)
    content: dict[str, Any] = json.loads((source / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, "quantization_config": settings}, indent=2) + "\n")
    if (source / INDEX).is_file():
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    name = f"int4 in groups of {group}" if kind == "int4" else f"fp8 {BLOCK}x{BLOCK}"
    return QuantizationReport("", name, tuple(layers), tuple(unchanged), num_bytes, num_source_bytes)


def fp8_block(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The stored tensors of a matrix in E4M3 with a scale for each block, and the weights that they represent."""
    rows, columns = weight.shape
    padded = nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax(dim=(1, 3)) / LARGEST_FP8
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    numbers = (weight.float() / spread).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale_inv": scale}, numbers.float() * spread


def int4(name: str, weight: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """The stored tensors of a matrix in symmetric integers of 4 bits, packed as by compressed-tensors, and the weights
    that they represent. Scales have the type of the weight.
    """
    grouped = weight.float().unflatten(1, (-1, group))
    scale = (grouped.abs().amax(dim=2) / INT4_STEPS).to(weight.dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    numbers = (grouped / scale.float()[..., None]).round().clamp(-8, 7)
    represented = (numbers * scale.float()[..., None]).flatten(1)
    codes = (numbers.flatten(1) + 8).to(torch.int64).unflatten(1, (-1, PER_WORD))
    words = (codes << (4 * torch.arange(PER_WORD))).sum(dim=2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": shape}, represented


def _shapes(source: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors. Raises ModelRefused if a matrix is not of 16 or 32 bits."""
    found = dict[str, tuple[int, ...]]()
    for file in weight_files(source):
        with safe_open(source / file, "pt") as tensors:  # pyright: ignore[reportUnknownVariableType]
            for name in tensors.keys():  # noqa: SIM118
                part: Any = tensors.get_slice(name)
                found[name] = tuple(part.get_shape())
                if len(found[name]) > 1 and part.get_dtype() not in ("F32", "BF16", "F16"):
                    raise ModelRefused(f"{name} has the type {part.get_dtype()}")
    if not found:
        raise ModelRefused("it has no weights in safetensors")
    return found


def _linear_weights(config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The matrices of linear layers and experts, by their names in the checkpoint."""
    module = models.build_on_meta(config, "auto")
    head = module.get_output_embeddings()
    linear = {name for name, part in module.named_modules() if type(part) is nn.Linear and part is not head}
    experts = {name for name, part in module.named_modules() if is_experts(part)}
    found = list[str]()
    for name, target in targets_of(module, shapes).items():
        owner, _, leaf = target.rpartition(".")
        is_linear = (owner in linear and leaf == "weight") or owner in experts
        if is_linear and len(shapes[name]) == 2 and name.endswith(".weight") and shapes[name][0] >= MIN_OUTPUTS:
            found.append(name)
    return found


def _group_of(shapes: Iterable[tuple[int, ...]]) -> int:
    inputs = [shape[1] for shape in shapes]
    for group in GROUPS:
        if all(size % group == 0 for size in inputs):
            return group
    return GROUPS[-1]


def _error(name: str, weight: Tensor, represented: Tensor) -> LayerError:
    difference, size = weight - represented, float(weight.norm())
    largest = float(weight.abs().max())
    relative = float(difference.norm()) / size if size else 0.0
    return LayerError(name, tuple(weight.shape), relative, float(difference.abs().max()) / largest if largest else 0.0)


def _copy_others(source: Path, folder: Path) -> None:
    """Copies the tokenizer and other small files."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and path.name not in (CONFIG, INDEX):
            shutil.copyfile(path, folder / path.name)


def _layers(weights: Iterable[str]) -> list[str]:
    return [name.removesuffix(".weight") for name in weights]


def _fp8_settings(unchanged: Iterable[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [*dict.fromkeys((*_layers(unchanged), "lm_head"))],
    }


def _int4_settings(group: int, unchanged: Iterable[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [*dict.fromkeys((*_layers(unchanged), "lm_head"))],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


if __name__ == "__main__":
    print(msgspec.json.encode(main(*sys.argv[1:])).decode())
