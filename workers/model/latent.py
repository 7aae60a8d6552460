"""Latent attention in absorbed form: only the latent and the rotary key of each token are stored.

The model computes the keys and values of all heads from one latent c of a token: W_K c and W_V c, beside a rotary key r
that the heads share. With a head's query (q, p), of which p is rotated,

    score   q . (W_K c) + p . r  =  (W_K^T q, p) . (c, r)
    output  sum of weights times W_V c  =  W_V (sum of weights times c)

so the layer attends with queries (W_K^T q, p) to a single key head (c, r) whose values are its first dims, and W_V is
applied after the merge. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. Layers are recognized by their parts, not
by their class; the forward pass of transformers runs in the layers that replace them. Each replacement is compared with
the layer that it replaces before it serves: docs/adr/0009-latents-in-swapped-layers.md.

Shape letters: H heads, N and V dims of a head's unrotated key and of its value, L dims of the latent, R of the rotary
key, T tokens, S keys.
"""

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from longleaf.attention import reference
from longleaf.formatting import human_rounded
from workers.model import hook

PROJECTIONS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
SIZES = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")
POSITIONS = (0, 1, 2, 3, 7, 13, 31, 60)
"""Positions of the rows on which a layer is compared with its replacement."""
TOLERANCE = 1e-4
"""Largest difference of an output in the comparison, which is in float32, relative to the largest output. Another order
of the products gave 2e-6; a missing factor or dim gives more than 0.01.
"""

log = logging.getLogger(__name__)


class LatentQueries(nn.Module):
    """The layer's projection to queries [..., H * (N + R)], followed by the map to latent queries [..., H * (L +
    R)].
    """

    def __init__(self, projection: nn.Module, plain: Any) -> None:
        super().__init__()
        self.projection = projection
        self.kv_b_proj = plain.kv_b_proj
        self.sizes: tuple[int, int] = (plain.num_heads, plain.qk_nope_head_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        num_heads, key_dim = self.sizes
        weight = self.kv_b_proj.weight.to(hidden.dtype)  # the same tensor, except while weights are converted
        key_HNL = weight.unflatten(0, (num_heads, -1))[:, :key_dim]
        query = self.projection(hidden).unflatten(-1, (num_heads, -1))
        latent = torch.einsum("...hn,hnl->...hl", query[..., :key_dim], key_HNL)
        return torch.cat((latent, query[..., key_dim:]), dim=-1).flatten(-2)


class LatentOutputs(nn.Module):
    """Maps the heads' means of latents [..., H * L] to their means of values, and applies the layer's projection."""

    def __init__(self, projection: nn.Module, plain: Any) -> None:
        super().__init__()
        self.projection = projection
        self.kv_b_proj = plain.kv_b_proj
        self.sizes: tuple[int, int] = (plain.num_heads, plain.qk_nope_head_dim)

    def forward(self, latent: Tensor) -> Tensor:
        num_heads, key_dim = self.sizes
        weight = self.kv_b_proj.weight.to(latent.dtype)
        value_HVL = weight.unflatten(0, (num_heads, -1))[:, key_dim:]
        mean = torch.einsum("...hl,hvl->...hv", latent.unflatten(-1, (num_heads, -1)), value_HVL)
        return self.projection(mean.flatten(-2))


class LatentAttention(nn.Module):
    """The methods in which an absorbed layer differs from the layer `plain`, whose class is its other base.

    With another attention function than the hook it computes the result of `plain`, for comparisons.
    """

    config: Any
    plain: nn.Module
    kv_lora_rank: int

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [1, 1, T, L + R] and values [1, 1, T, L], which are a view of the keys: nothing is expanded."""
        keys = torch.cat((kv_nope, k_rot), dim=-1)
        return keys, keys[..., : self.kv_lora_rank]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self.config._attn_implementation != hook.NAME:
            return self.plain(*inputs, **options)
        return super().forward(*inputs, **options)


class _Reached(Exception):
    """Ends a forward pass at its first layer of latent attention, and carries the layer's arguments."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options


class _Reference:
    """A handle that attends in float64 and causally to the rows of the call only."""

    def attend(self, layer: int, q_THD: Tensor, k_KTD: Tensor, v_KTV: Tensor, call: hook.LayerCall) -> Tensor:
        if call.unsupported:
            raise ValueError(f"it uses `{call.unsupported}`")
        mask_TS = torch.ones(len(q_THD), len(q_THD), dtype=torch.bool, device=q_THD.device).tril()
        k_SKD, v_SKV = k_KTD.transpose(0, 1), v_KTV.transpose(0, 1)
        found = reference.attend(q_THD, k_SKD, v_SKV, mask_TS, call.scale, softcap=call.softcap, sink_H=call.sink_H)
        return found.out_THD


@torch.inference_mode()
def absorb(model: PreTrainedModel) -> None:
    """Replaces the layers of latent attention whose absorbed form is equivalent. A layer whose parts are quantized, or
    whose replacement computes something else, is left unchanged, with a warning: its keys and values are stored
    expanded.
    """
    latents = {name: part for name, part in model.named_modules() if is_latent(part)}
    if not latents:
        return
    left: dict[str, str] = {}
    options = _options(model, list(latents.values()))
    for name, plain in latents.items():
        if reason := "its arguments are not known" if options is None else unproven(plain, options):
            left[name] = reason
        else:
            model.set_submodule(name, absorbed(plain))
    for name, reason in list(left.items())[:1]:
        which = f"{len(left)} of {len(latents)} layers of latent attention"
        log.warning("%s store expanded keys and values; %s: %s", which, name, reason)


def absorb_as(model: PreTrainedModel, proven: nn.Module) -> None:
    """Replaces the layers of latent attention that were replaced in `proven`, a model of the same config, without a
    comparison.
    """
    for name, plain in list(model.named_modules()):
        if is_latent(plain) and isinstance(proven.get_submodule(name), LatentAttention):
            model.set_submodule(name, absorbed(plain))


def is_latent(part: nn.Module) -> bool:
    """Whether a module makes the keys and values of its heads from a latent, in the way and by the names of DeepSeek's
    layers in transformers.
    """
    modules, sizes = part._modules, vars(part)
    has_query = any(modules.get(name) is not None for name in ("q_proj", "q_b_proj"))
    has_parts = has_query and all(modules.get(name) is not None for name in PROJECTIONS)
    return has_parts and all(name in sizes for name in SIZES) and hasattr(part, "expand_kv")


def absorbed(plain: Any) -> nn.Module:
    """The layer `plain`, with its weights, over one key head of latent and rotary key."""
    layer: Any = copy.copy(plain)
    layer._modules = dict(plain._modules)  # the copy shared it; the weights remain shared
    layer.__class__ = type(f"Latent{type(plain).__name__}", (LatentAttention, type(plain)), {})
    layer.plain = plain
    queries = "q_proj" if plain._modules.get("q_b_proj") is None else "q_b_proj"
    setattr(layer, queries, LatentQueries(getattr(plain, queries), plain))
    layer.o_proj = LatentOutputs(plain.o_proj, plain)
    layer.qk_nope_head_dim = layer.v_head_dim = plain.kv_lora_rank
    layer.qk_head_dim = plain.kv_lora_rank + plain.qk_rope_head_dim
    return layer


def unproven(plain: Any, options: dict[str, Any]) -> str:
    """Compares a layer with its replacement on random rows, in float32. Returns the reason why it cannot be absorbed,
    or an empty string. `options` are the arguments of its forward pass, without the rows, which are generated.
    """
    projection = plain.kv_b_proj
    if type(projection) is not nn.Linear or projection.bias is not None:
        return f"kv_b_proj is {projection}, not plain weights"
    wanted_shape = (plain.num_heads * (plain.qk_nope_head_dim + plain.v_head_dim), plain.kv_lora_rank)
    if projection.weight.shape != wanted_shape:
        return f"kv_b_proj is of {tuple(projection.weight.shape)}, not {wanted_shape}"
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, len(POSITIONS), plain.kv_a_proj_with_mqa.in_features, generator=generator)
    options = {**options, "hidden_states": rows.to(projection.weight.device)}
    try:
        wanted, found = (_output(layer, options) for layer in (plain, absorbed(plain)))
    except Exception as error:  # any error leaves the layer unchanged
        return f"it cannot be compared: {type(error).__name__}: {error}"
    difference, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not 0 < largest or not difference <= TOLERANCE * largest:  # also true for NaN
        return f"absorbed, its outputs differ by {human_rounded(difference, 2)} of {human_rounded(largest, 2)}"
    return ""


def _output(layer: nn.Module, options: dict[str, Any]) -> Tensor:
    """The output of a layer with its weights in float32."""
    weights = {name: _widened(parameter) for name, parameter in layer.named_parameters()}
    # tied weights under one name only: with two names they would be restored in the wrong order
    return functional_call(layer, weights, args=(), kwargs=options, tie_weights=False)[0]


def _widened(parameter: Tensor) -> Tensor:
    """Converts 16-bit floats to float32; a number that is expanded to its shape stays expanded."""
    if not parameter.is_floating_point() or parameter.itemsize != 2:
        return parameter
    first = parameter[(slice(1),) * parameter.dim()]
    return parameter.float() if any(parameter.stride()) else first.float().expand(parameter.shape)


def _options(model: PreTrainedModel, latents: list[nn.Module]) -> dict[str, Any] | None:
    """The arguments, without the rows, with which the model calls the first of some layers; None if it fails before.
    16-bit floats are widened.
    """

    def stop(_layer: nn.Module, _inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        raise _Reached(options)

    device = next(model.parameters()).device
    ids, positions = torch.arange(3, 3 + len(POSITIONS), device=device), torch.tensor(POSITIONS, device=device)
    hooks = [layer.register_forward_pre_hook(stop, with_kwargs=True) for layer in latents]
    try:
        model(**hook.arguments(_Reference().attend, ids, positions, has_offsets=False))
    except _Reached as reached:
        return {name: _wide(value) for name, value in reached.options.items()}
    except Exception as error:  # the preflight reports the problem
        log.debug("no arguments of latent attention: %s", error)
    finally:
        for handle in hooks:
            handle.remove()
    return None


def _wide(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_wide(part) for part in value)
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
