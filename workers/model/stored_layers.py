"""The linear layers whose quantized weights remain as stored in memory."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longleaf.errors import StartError
from longleaf.kernels.cpu.quantized_linear import NativeQuantizedLinear, QuantizedLinear
from workers.model.latent import is_latent
from workers.model.quantized_weights import DequantizedTensor, StoredTensor
from workers.model.weight_shares import Cut

Read = tuple[StoredTensor, str, str | None]
"""A tensor of a checkpoint, the parameter that it becomes, and the pattern of the conversion that makes it, if any."""


class LayerWithoutWeight(nn.Module):
    """Stands for a linear layer while the other parameters are read."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.bias = layer.bias


def load_kernel(device: str) -> NativeQuantizedLinear:
    """The compiled product. Raises StartError with the reason if this device has none."""
    if device != "cpu":
        raise StartError(f"weights_dtype: stored is supported on CPUs only, and this rank uses {device}")
    try:
        return NativeQuantizedLinear.load()
    except OSError as error:
        raise StartError(f"weights_dtype: stored requires a compiled kernel: {error}") from error


def stored_layers(
    module: PreTrainedModel, tensors: Mapping[str, Read], cuts: Mapping[str, Cut]
) -> tuple[dict[str, DequantizedTensor], str]:
    """The tensors that remain as stored, by the parameter that they are, and a description for users. `tensors` are
    slices of a share, by their names in the checkpoint. `cuts` divide parameters.
    """
    names = {layer: name for name, layer in module.named_modules(remove_duplicate=False)}
    latent = {part.kv_b_proj for part in module.modules() if is_latent(part)}
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    found, reasons = dict[str, DequantizedTensor](), Counter[str]()
    layers: dict[str, Any] = {f"{name}.weight": layer for layer, name in names.items() if type(layer) is nn.Linear}
    for tensor, target, pattern in tensors.values():
        if not isinstance(tensor, DequantizedTensor):
            continue
        layer = layers.get(target)
        if pattern is not None or layer is None:
            reason = "experts and converted weights have no kernel"
        elif layer in latent:
            reason = "latent attention reads it outside of products"
        elif uses[id(layer.weight)] > 1:
            reason = "it is tied to another parameter"
        else:
            tensor = tensor.with_groups_in_order()
            reason = tensor.reason_to_dequantize
            cut = cuts.get(target)
            if not reason and cut is not None and cut.dim == 1 and cut.unit % tensor.input_unit:
                reason = "its groups of inputs cannot be divided"
        if reason:
            reasons[reason] += 1
        else:
            found[target] = tensor
    others = "".join(f"; {count} dequantized: {reason}" for reason, count in reasons.most_common())
    return found, f"{len(found)} quantized tensors remain as stored{others}"


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all weights of a model."""
    matrices = [layer.matrix.num_bytes for layer in module.modules() if isinstance(layer, QuantizedLinear)]
    return sum(parameter.nbytes for parameter in module.parameters()) + sum(matrices)
