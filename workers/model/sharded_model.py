"""Loads the share of a checkpoint's weights that one rank holds, and later other parts.

The rules are derived from the model without weights, which also passes the preflight. Then the share is read, and
layers are replaced by sharded ones.
"""

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from longleaf.config import DtypeName
from longleaf.errors import ModelRefused, StartError
from longleaf.formatting import human_bytes
from longleaf.kernels.cpu.quantized_linear import NativeQuantizedLinear, QuantizedLinear
from workers.model import latent
from workers.model import model as models
from workers.model.local_weights import LocalMatrix, LocalParameter, LocalPlace, LocalWeights, Values, describe_share
from workers.model.meta_model import Outline, outline
from workers.model.mixers import replace_mixers
from workers.model.model import Model
from workers.model.quantized_weights import Quantization, pop_quantization
from workers.model.rotary import replace_rotary
from workers.model.sharded_layers import (
    OutputGroup,
    PairRows,
    RowExchange,
    ShardedEmbedding,
    ShardedExperts,
    ShardedLinear,
    ShardedPairInput,
    ShardedPairOutput,
    replace_modules,
)
from workers.model.stored_layers import load_kernel, weight_bytes
from workers.model.weight_parts import WeightPlan, align_pairs, plan_weights
from workers.model.weight_reader import LoadedShare, check_types, dtype_of, input_units, read_share
from workers.model.weight_shares import Share
from workers.model.weights import check_weights, large_blocks_apart, loading_to_device

log = logging.getLogger("longleaf.weights")  # messages logged while a rank loads are shown to users


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model of which this rank holds a share, and the bytes of weights that were read for it."""

    model: Model
    plan: WeightPlan
    num_bytes_read: int
    weights: LocalWeights


def load_share(folder: str, dtype: DtypeName, device: str, share: Share, *, keeps_stored: bool = False) -> ShardedModel:
    """Loads a share of the checkpoint in `folder`. With `keeps_stored`, quantized weights remain as stored where that
    is supported. Raises ModelRefused with the reason when it cannot be served.
    """
    config = models.read_config(folder)
    quantization = pop_quantization(config)
    try:
        check_weights(Path(folder), config)
        check_types(Path(folder), quantization)
    except ModelRefused:
        raise
    except Exception as error:  # any error in the index refuses the folder
        raise models.refusal(folder, error, config) from error
    dtype = dtype_of(folder, config, dtype, quantization)
    kernel = load_kernel(device) if keeps_stored and quantization is not None else None
    found = _attempt(folder, config, dtype, device, share, 0, quantization, kernel)
    for number in range(1, len(models.auto_classes(config))):
        if not found.loaded.missing:
            break
        found = _attempt(folder, config, dtype, device, share, number, quantization, kernel)
    module, loaded = found.module, found.loaded
    models.check_complete(folder, loaded.missing, loaded.mismatched)
    local_bytes = weight_bytes(module)
    numbers = f"{human_bytes(local_bytes)} in {describe_share(share)}, {human_bytes(loaded.num_bytes)} read"
    log.info("weights: sharded, %s", numbers)
    parts: dict[str, Any] = dict(module.named_modules())
    model, layers = assemble(module, found.known, found.plan, device, share)
    assert model.exchange is not None
    read = partial(_read_parts, folder, config, dtype, device, found, quantization, kernel)
    weights = LocalWeights(_places(found, parts, layers), model.exchange, read)
    return ShardedModel(replace(model, layouts=loaded.layouts), found.plan, loaded.num_bytes, weights)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A module with the share of its weights, built by one of the auto classes of transformers."""

    number: int
    module: PreTrainedModel
    loaded: LoadedShare
    plan: WeightPlan
    known: Outline
    shapes: dict[str, tuple[int, ...]]
    """The full shapes of the parameters."""


def _attempt(
    folder: str,
    config: PreTrainedConfig,
    dtype: DtypeName,
    device: str,
    share: Share,
    number: int,
    quantization: Quantization | None,
    kernel: NativeQuantizedLinear | None,
) -> _Attempt:
    """Reads the share into the module of an auto class. Raises ModelRefused."""
    known = outline(folder, dtype, number)
    plan = plan_weights(known, share.count)
    module = models.build_on_meta(config, dtype, number)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.state_dict().items()}
    if kernel is not None and quantization is not None:
        plan = align_pairs(plan, input_units(module, Path(folder), quantization), shapes)
    for name in plan.embeddings:
        _shift_padding(module.get_submodule(name), share)
    try:
        with large_blocks_apart(), loading_to_device(device):
            loaded = read_share(module, Path(folder), plan.cuts, share, module.dtype, quantization, kernel=kernel)
    except (ModelRefused, StartError):
        raise
    except Exception as error:  # any error in the files refuses the folder
        raise models.refusal(folder, error, config) from error
    return _Attempt(number, module, loaded, plan, known, shapes)


def _read_parts(
    folder: str,
    config: PreTrainedConfig,
    dtype: DtypeName,
    device: str,
    made: _Attempt,
    quantization: Quantization | None,
    kernel: NativeQuantizedLinear | None,
    share: Share,
) -> tuple[dict[str, Values], int]:
    """The divided parameters of a share, and the bytes that were read for them."""
    module = models.build_on_meta(config, dtype, made.number)
    cuts = made.plan.cuts
    with large_blocks_apart(), loading_to_device(device):
        loaded = read_share(
            module, Path(folder), cuts, share, module.dtype, quantization, kernel=kernel, only_divided=True
        )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    read: dict[str, Values] = {
        name: parameters[name].data for name in cuts if name in parameters and not parameters[name].is_meta
    }
    for name, part in module.named_modules():
        if isinstance(part, QuantizedLinear) and f"{name}.weight" in cuts:
            read[f"{name}.weight"] = part.matrix
    return read, loaded.num_bytes


def _shift_padding(embedding: Any, share: Share) -> None:
    """Sets the index of the padding word within the share: some families zero its row after loading."""
    index, offset = embedding.padding_idx, 0
    embedding.padding_idx = None
    for start, end in share.ranges(embedding.num_embeddings):
        if index is not None and start <= index < end:
            embedding.padding_idx = offset + index - start
        offset += end - start


def assemble(
    module: PreTrainedModel, known: Outline, plan: WeightPlan, device: str, share: Share
) -> tuple[Model, dict[nn.Module, nn.Module]]:
    """The model that computes with the ranks of the other shares, and the sharded layers that replace its modules.
    `module` has the weights of the share; `known` and `plan` are those of the same config.
    """
    module.eval().requires_grad_(False)
    module.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    parts: dict[str, Any] = dict(module.named_modules())
    latent.absorb_as(module, known.model.module)
    ropes, rotary = replace_rotary(models.decoder_of(module), module.config.get_text_config())
    mixers = replace_mixers(module)
    exchange = RowExchange(share)
    shapes = {name: tuple(parameter.shape) for name, parameter in known.parameters.items()}
    layers = sharded_layers(parts, plan, exchange, shapes)
    replace_modules(module, layers)
    made = {"ropes": ropes, "rotary": rotary, "exchange": exchange, "mixers": mixers if mixers.layers else None}
    model = replace(known.model, module=module, device=device, **made)
    return model, layers


def _places(found: _Attempt, parts: dict[str, Any], layers: dict[nn.Module, nn.Module]) -> dict[str, LocalPlace]:
    """The places of the divided parameters in the layers that replace `parts`."""
    places = dict[str, LocalPlace]()
    for name, cut in found.plan.cuts.items():
        owner, _, leaf = name.rpartition(".")
        is_transposed = isinstance(parts[owner], Conv1D) and leaf == "weight"
        size = found.shapes[name][cut.dim]
        place: LocalPlace
        if isinstance(parts[owner], QuantizedLinear) and leaf == "weight":
            place = LocalMatrix(layers[parts[owner]], cut, size)
        else:
            place = LocalParameter(layers[parts[owner]], leaf, cut, size, is_transposed)
        places[name] = place
    return places


@torch.no_grad()
def sharded_layers(
    parts: dict[str, Any], plan: WeightPlan, exchange: RowExchange, shapes: dict[str, tuple[int, ...]]
) -> dict[nn.Module, nn.Module]:
    """The sharded layers that replace the modules of a plan, which hold a share of their weights. `parts`: the modules
    by name; `shapes`: those of their whole parameters.
    """
    found = dict[nn.Module, nn.Module]()
    for names in plan.groups:
        group = OutputGroup(exchange)
        for name in names:
            part = parts[name]
            found[part] = ShardedLinear(_local(part), _num_outputs(part, shapes.get(f"{name}.weight")), group)
    for pair in plan.pairs:
        rows, output = PairRows(exchange), parts[pair.output]
        found |= {parts[name]: ShardedPairInput(_local(parts[name]), rows) for name in pair.inputs}
        found[output] = ShardedPairOutput(_without_bias(output), output.bias, rows)
    for name in plan.embeddings:
        found[parts[name]] = ShardedEmbedding(parts[name], parts[name].num_embeddings, exchange)
    for experts in plan.experts:
        part = parts[experts.name]
        found[part] = ShardedExperts(part, experts.num_experts, exchange, experts.added_once)
    return found


def _local(layer: Any) -> nn.Module:
    """The linear layer of this rank's outputs."""
    if isinstance(layer, QuantizedLinear):
        return layer
    if isinstance(layer, Conv1D):
        return _linear(nn.Parameter(layer.weight.T.contiguous(), requires_grad=False), layer.bias)
    return _linear(layer.weight, layer.bias)


def _num_outputs(layer: Any, shape: tuple[int, ...] | None) -> int:
    """The number of all outputs. `shape`: that of the whole weight, unless it is tied to another one."""
    if isinstance(layer, QuantizedLinear):  # which has those of the share
        assert shape is not None
        return shape[0]
    return layer.nf if isinstance(layer, Conv1D) else layer.out_features


def _without_bias(layer: Any) -> nn.Module:
    if isinstance(layer, QuantizedLinear):
        return QuantizedLinear(layer.matrix, None, layer.dtype, layer.kernel)
    return _linear(layer.weight, None)


def _linear(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    num_out, num_in = weight_OI.shape
    layer: Any = nn.Linear(num_in, num_out, bias=False, device="meta")
    layer.weight, layer.bias = weight_OI, bias_O
    return layer
