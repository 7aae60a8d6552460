"""The model of a checkpoint without its weights.

The model is built as for serving, but each parameter is a single number, expanded to its shape: the same code runs the
same preflight, data-dependent branches included, even where the weights would not fit.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from longleaf.config import DtypeName
from longleaf.errors import ModelRefused
from workers.model import model as models
from workers.model.model import Model
from workers.model.quantized_weights import pop_quantization

WEIGHT = 2.0**-10
"""Value of all weights. Not 0, so that operations outside of attention that mix rows may be detected."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The model of a checkpoint without its weights, and the names that its parts had before any was replaced."""

    model: Model
    modules: dict[nn.Module, str]
    parameters: dict[str, nn.Parameter]
    """Tied parameters under their first name only."""


def outline(folder: str, dtype: DtypeName, number: int = 0) -> Outline:
    """The model of a checkpoint without its weights, with the original names. `number` selects one of its auto classes.
    Raises ModelRefused.
    """
    config = models.read_config(folder)
    if pop_quantization(config) is not None and dtype == "auto" and config.dtype is None:
        dtype = "bfloat16"  # as when the weights are dequantized
    try:
        module = build(config, dtype, number)
    except ModelRefused:
        raise
    except Exception as error:  # whatever the error, the model is refused
        raise models.refusal(folder, error, config) from error
    modules: dict[nn.Module, str] = {part: name for name, part in module.named_modules()}
    parameters = dict(module.named_parameters())
    with StretchedProducts():
        return Outline(models.prove(module, "cpu", has_weights=False), modules, parameters)


def build(config: PreTrainedConfig, wanted: DtypeName, number: int = 0) -> PreTrainedModel:
    """Builds the model with parameters of one number each, and buffers as after loading."""
    module = models.build_on_meta(config, wanted, number)
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            stretched = torch.tensor(WEIGHT, dtype=parameter.dtype).expand(parameter.shape)
            part.register_parameter(name, nn.Parameter(stretched, requires_grad=False))
            setattr(getattr(part, name), "_is_hf_initialized", True)  # noqa: B010
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.zeros_like(buffer, device="cpu"))
    module.tie_weights()
    module.initialize_weights()
    module.set_experts_implementation("eager")  # the grouped implementation refuses expanded weights
    return module


class StretchedProducts(TorchFunctionMode):
    """Computes linear layers without materialized weights: where all elements are equal, a product is a sum."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.linear or len(args) < 2 or any(args[1].stride()):
            return func(*args, **(kwargs or {}))
        x, weight = args[:2]
        bias = args[2] if len(args) > 2 else None
        sums = x.sum(dim=-1, keepdim=True) * weight[0, 0]
        return sums.repeat_interleave(len(weight), dim=-1) if bias is None else sums + bias
