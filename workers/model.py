"""Loads an unmodified transformers causal LM and proves that all its attention goes through the hook."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from longleaf.config import DtypeName
from longleaf.errors import ModelRefused
from longleaf.step import Rotary
from workers import hook
from workers.rotary import Ropes, replace_rotary


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What an attention layer computes, stores and sees: heads, key heads, their dim, its window (None: everything)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded checkpoint and its attention layers, by layer index."""

    module: PreTrainedModel
    layers: dict[int, LayerSpec]
    device: str
    dtype: torch.dtype
    ropes: Ropes
    """Set before each forward pass: by which rope each row is rotated."""
    rotary: Rotary

    @property
    def decoder(self) -> torch.nn.Module:
        """The model without its head."""
        return self.module.base_model

    @property
    def last_layer(self) -> int:
        return max(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        elements = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.layers.values())
        return elements * self.dtype.itemsize


class Probe:
    """The preflight's handle: notes what each attention layer asks for and answers zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerSpec] = {}

    def attend(self, layer: int, q_THD: Tensor, k_KTD: Tensor, v_KTD: Tensor, call: hook.LayerCall) -> Tensor:
        if call.unsupported:
            raise ModelRefused(f"attention layer {layer} uses `{call.unsupported}`, which is not supported yet")
        if k_KTD.shape != v_KTD.shape:
            raise ModelRefused(f"attention layer {layer} has keys and values of different sizes, not supported yet")
        if call.sink_H is not None and call.sink_H.shape != q_THD.shape[1:2]:
            raise ModelRefused(f"attention layer {layer} has sinks that are not one per head, not supported yet")
        if layer in self.layers:
            raise ModelRefused(f"attention layer {layer} attends twice")
        self.layers[layer] = LayerSpec(q_THD.shape[1], k_KTD.shape[0], k_KTD.shape[2], call.window)
        return torch.zeros_like(q_THD)


def load(folder: str, dtype: DtypeName, device: str) -> Model:
    """Loads the checkpoint in `folder`. Raises ModelRefused with the reason when it cannot be served exactly."""
    hook.register()
    logging.disable_progress_bar()
    if not (Path(folder) / "config.json").is_file():
        raise ModelRefused(f"{folder} holds no config.json: not a model folder")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        check_config(config)
        loader: Any = AutoModelForCausalLM  # its annotations do not know output_loading_info
        module, report = loader.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=hook.NAME,
            local_files_only=True,
            output_loading_info=True,
        )
    except ModelRefused:
        raise
    except Exception as error:  # whatever is wrong with the files, it is the folder that is refused
        raise ModelRefused(f"{folder} cannot be loaded as a causal language model: {_first_line(error)}") from error
    if report["missing_keys"]:
        raise ModelRefused(f"{folder} lacks weights of a causal language model: {sorted(report['missing_keys'])[:3]}")
    check_causal(module)
    module.eval().requires_grad_(False)
    module.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    ropes, rotary = replace_rotary(module)
    return Model(module, preflight(module, device), device, module.dtype, ropes, rotary)


def check_config(config: PreTrainedConfig) -> None:
    """Refuses what the hook cannot see: masks that transformers makes outside of attention."""
    text = config.get_text_config()
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        raise ModelRefused("chunked attention is not supported yet")
    if getattr(text, "use_bidirectional_attention", False):
        raise ModelRefused("bidirectional attention is not causal")


def check_causal(module: PreTrainedModel) -> None:
    """Refuses encoders that transformers also loads as causal language models: their attention sees the future."""
    for name, part in module.named_modules():
        if getattr(part, "is_causal", True) is False:
            raise ModelRefused(f"{type(module).__name__}: {name} is not causal")


@torch.inference_mode()
def preflight(module: PreTrainedModel, device: str) -> dict[int, LayerSpec]:
    """Runs two tokens and checks that every attention layer called the hook; some families ignore it silently."""
    probe = Probe()
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    forward_checked(module.base_model, probe, input_ids=ids, position_ids=positions)
    expected = module.config.get_text_config().num_hidden_layers
    if sorted(probe.layers) != list(range(expected)):
        name = type(module).__name__
        raise ModelRefused(f"{name}: {len(probe.layers)} of {expected} layers attend through the hook")
    return probe.layers


def forward_checked(module: torch.nn.Module, step: hook.Handle, **inputs: Tensor) -> Any:
    """One forward with the step's handle; a model that refuses the handle is refused."""
    try:
        return module(**inputs, use_cache=False, step=step)
    except ModelRefused:
        raise
    except Exception as error:
        raise ModelRefused(f"{type(module).__name__} cannot run with the hook: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
