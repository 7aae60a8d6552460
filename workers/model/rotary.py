"""Rotary positions that stay exact at large positions, in place of the model's own.

Models multiply positions and inverse frequencies in float32. The product, the phase, has 24 bits: at a million tokens
it is off by hundredths of a radian, and past 2^24 adjacent positions coincide. Here phases are, per row, either
float32, bit-identical to the model's own, or float64. A context keeps the precision with which it was created, because
its keys were rotated with it. The same holds for scalings that depend on the number of positions (longrope, dynamic),
which transformers derives from the largest position of a batch.

Inverse frequencies come from transformers' own functions, which run in float64 where phases do. A module is replaced
once the new one has given the same numbers at small positions; a module for which that fails is kept, and the reason is
reported.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longleaf.errors import ModelRefused
from longleaf.positions import FLOAT32_POSITIONS, OWN_ROPE, Rope, Rotary
from workers.host_copies import to_device

LENGTH_DEPENDENT = {"longrope": False, "dynamic": True}
"""Scalings that depend on the number of positions, and whether each number of positions has a separate scaling."""
RECOMPUTING = ("phi3", "phi4_multimodal")
"""Types of models whose `prepare_inputs_for_generation` drops the cache when a text outgrows the short factors of
longrope.
"""
MAX_TABLES = 64
PROBE = (0, 1, 2, 3, 7, 13, 31)
"""Positions at which a module is compared with the one that it replaces."""
FLOAT64_ERROR = 2.0**-50
"""Relative error of a float64 phase: two units of the frequency in the last place, and the product's rounding."""

Rows = dict[Rope, Tensor | None]
"""By rope: the mask [T] of the rows that it rotates; None for all rows."""
Parts = tuple[Tensor, ...]
Tables = tuple[Tensor, float]
"""Inverse frequencies, and the factor of cosines and sines."""


class Ropes:
    """The rope by which each row of the current step is rotated; set before the model runs."""

    def __init__(self) -> None:
        self.rows: Rows = {OWN_ROPE: None}


def row_ropes(ropes: Iterable[Rope], device: str) -> Rows:
    """The masks of T rows by rope; `ropes` has the rope of each row."""
    listed = list(ropes)
    kinds = list(dict.fromkeys(listed))
    if len(kinds) == 1:
        return {kinds[0]: None}
    return {kind: to_device(torch.tensor([rope == kind for rope in listed]), device) for kind in kinds}


class LongRotary(nn.Module):
    """Computes the outputs of transformers' rotary modules from positions, with the ropes of the step. Raises
    ModelRefused when `own` cannot be replaced.
    """

    def __init__(self, own: Any, ropes: Ropes) -> None:
        super().__init__()
        self._ropes = ropes
        self.config = own.config
        """Like `layer_types`, an attribute that models read: Granite 4.2 with windows, and LFM3."""
        kinds: dict[str | None, str] = own.rope_type if isinstance(own.rope_type, dict) else {None: own.rope_type}
        self.kinds = kinds
        """The kind of rope by type of layer; the key is None where all layers have the same."""
        self.layer_types = list(getattr(own, "layer_types", ()))
        default: Callable[..., Tables] = own.compute_default_rope_parameters
        self._make = {layer: ROPE_INIT_FUNCTIONS.get(kind, default) for layer, kind in kinds.items()}
        self._own = {layer: _own_tables(own, layer) for layer in kinds}
        self._tables = lru_cache(MAX_TABLES)(self._make_tables)
        self._lay_out, self._dtype = _layout(own, self._own)
        for layer in kinds:
            self._check(own, layer)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Tensor | Parts:
        """Cosines and sines of `position_ids` [1, T], or both as complex numbers, in the layout of the model's own
        module.

        Models that see images have [A, 1, T], time and place in an image; for text all A are the same.
        """
        position_ids = position_ids.reshape(-1, *position_ids.shape[-2:])[0]
        found: Parts | None = None
        for rope, mask_T in self._ropes.rows.items():
            parts = self._rotate(x, position_ids, layer_type, rope)
            if found is not None and mask_T is not None:
                parts = tuple(torch.where(mask_T[:, None], *pair) for pair in zip(parts, found, strict=True))
            found = parts
        assert found is not None, "a step without rows"
        first, *others = found
        return found if others else first

    def _rotate(self, x: Tensor, position_ids: Tensor, layer: str | None, rope: Rope) -> Parts:
        inv_freq, factor = self._tables(layer, rope, x.device)
        phases = position_ids[..., None].to(inv_freq.dtype) * inv_freq
        return tuple(part.to(self._dtype or x.dtype) for part in self._lay_out(phases, factor))

    def _make_tables(self, layer: str | None, rope: Rope, device: torch.device) -> Tables:
        if not rope.is_double and not rope.scaled_for:
            inv_freq, factor = self._own[layer]
        else:
            options: dict[str, Any] = {} if layer is None else {"layer_type": layer}
            if rope.scaled_for:  # a tensor, as in transformers, for the same rounding
                options["seq_len"] = rope.scaled_for if rope.is_double else torch.tensor(rope.scaled_for)
            with _InDouble(rope.is_double):
                inv_freq, factor = self._make[layer](self.config, **options)
        return inv_freq.to(device), factor

    def frequencies(self, layer: str | None, scaled_for: int = 0) -> tuple[Tensor, Tensor]:
        """Inverse frequencies in float32 and float64."""
        ropes = (Rope(scaled_for=scaled_for, is_double=is_double) for is_double in (False, True))
        single, double = (self._tables(layer, rope, torch.device("cpu"))[0] for rope in ropes)
        return single, double

    def _check(self, own: Any, layer: str | None) -> None:
        single, double = self.frequencies(layer)
        if single.shape != double.shape or not torch.allclose(single.double(), double, rtol=1e-5, atol=0):
            raise ModelRefused("its inverse frequencies are not those of its config")
        positions = torch.tensor([PROBE], device=next(own.buffers()).device)
        options = () if layer is None else (layer,)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.zeros(1, dtype=dtype, device=positions.device)
            wanted, found = _parts(own(x, positions, *options)), _parts(self(x, positions, *options))
            pairs = zip(wanted, found, strict=True)
            if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
                raise ModelRefused("it does not compute cosines and sines of positions times frequencies")
        if self.kinds[layer] == "longrope":
            self._check_long(own, layer, positions)

    def _check_long(self, own: Any, layer: str | None, positions: Tensor) -> None:
        border = int(_parameters_of(self.config, layer)["original_max_position_embeddings"])
        x, positions = torch.zeros(1, device=positions.device), positions + border
        wanted = _parts(own(x, positions, *(() if layer is None else (layer,))))
        found = self._rotate(x, positions, layer, Rope(scaled_for=border + 1))
        if not all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(wanted, found, strict=True)):
            raise ModelRefused("it does not use the long factors of its config past the original length")


class _InDouble(TorchFunctionMode):
    """Runs float32 code in float64."""

    def __init__(self, is_on: bool) -> None:
        super().__init__()
        self._is_on = is_on

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_on:
            return func(*args, **(kwargs or {}))
        func = Tensor.double if func is Tensor.float else func
        named = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        return func(*map(_doubled, args), **named)


def _doubled(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def _cos_sin(phases: Tensor, factor: float) -> Parts:
    return phases.cos() * factor, phases.sin() * factor


LAYOUTS: dict[str, Callable[[Tensor, float], Parts]] = {
    "halves": lambda phases, factor: _cos_sin(torch.cat((phases, phases), dim=-1), factor),
    "pairs": lambda phases, factor: _cos_sin(torch.repeat_interleave(phases, 2, dim=-1), factor),
    "single": _cos_sin,
    "complex": lambda phases, factor: (torch.polar(torch.ones_like(phases), phases) * factor,),
}
"""Layouts of the outputs of rotary modules, from phases [1, T, N]."""


def _layout(own: Any, tables: dict[str | None, Tables]) -> tuple[Callable[[Tensor, float], Parts], torch.dtype | None]:
    """The layout of a module's outputs, and their dtype if it is always the same. Raises ModelRefused."""
    layer, (inv_freq, factor) = next(iter(tables.items()))
    options = () if layer is None else (layer,)
    positions = torch.tensor([PROBE], device=inv_freq.device)
    single, half = (
        _parts(own(torch.zeros(1, dtype=dtype, device=inv_freq.device), positions, *options))
        for dtype in (torch.float32, torch.bfloat16)
    )
    for lay_out in LAYOUTS.values():
        found = lay_out(positions[..., None].float() * inv_freq, factor)
        if len(found) == len(single) and all(torch.equal(a, b) for a, b in zip(found, single, strict=True)):
            return lay_out, half[0].dtype if half[0].dtype == single[0].dtype else None
    raise ModelRefused("it has an unknown layout of cosines and sines")


def _own_tables(own: Any, layer: str | None) -> Tables:
    prefix = "" if layer is None else f"{layer}_"
    return getattr(own, f"{prefix}inv_freq").clone(), getattr(own, f"{prefix}attention_scaling")


def own_device(own: nn.Module) -> torch.device:
    return next(own.buffers()).device


def _parts(answer: Tensor | Parts) -> Parts:
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)


@torch.inference_mode()
def replace_rotary(decoder: nn.Module, config: PreTrainedConfig) -> tuple[Ropes, Rotary]:
    """Replaces the rotary modules of a text decoder. Returns the selection of ropes for each step, and a description of
    the model's positions. Raises ModelRefused when transformers would scale by the batch, and the module cannot be
    replaced.
    """
    names = [name for name, part in decoder.named_modules() if _is_rotary(part)]
    ropes, made, reason = Ropes(), list[LongRotary](), "" if names else "it has no rotary positions"
    for name in names:
        own: Any = decoder.get_submodule(name)
        try:
            made.append(LongRotary(own, ropes))
        except Exception as error:  # any error keeps the module
            reason = f"{type(own).__name__} cannot be replaced: {error}"
            if any(kind in str(getattr(own, "rope_type", "")) for kind in LENGTH_DEPENDENT):
                raise ModelRefused(f"rotary factors depend on the longest position, and {reason}") from error
        else:
            decoder.set_submodule(name, made[-1])
    limit = FLOAT32_POSITIONS if names else _trained(config)
    return ropes, msgspec.structs.replace(_describe(config, made), max_positions=limit if reason else 0, reason=reason)


def _is_rotary(part: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in part.named_buffers(recurse=False))


def _describe(config: Any, made: list[LongRotary]) -> Rotary:
    kinds = {kind for rotary in made for kind in rotary.kinds.values()}
    scalings = [parameters for parameters in _parameters(config) if parameters["rope_type"] in LENGTH_DEPENDENT]
    pairs = [pair for rotary in made for pair in _all_frequencies(rotary, is_scaled=bool(scalings))]
    return Rotary(
        kind="+".join(sorted(kinds)),
        trained=_trained(config),
        scaled_from=min((_scaled_from(config, parameters) for parameters in scalings), default=0),
        is_graded=any(LENGTH_DEPENDENT[parameters["rope_type"]] for parameters in scalings),
        has_mixed_keys=bool(scalings) and config.model_type not in RECOMPUTING,
        float32_error=max((_float32_error(*pair) for pair in pairs), default=0.0),
        float64_error=max((float(double.max()) * FLOAT64_ERROR for _, double in pairs), default=0.0),
    )


def _trained(config: Any) -> int:
    """Positions that a model was trained for: those of its config, or the length of its yarn scaling."""
    max_positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    return max([max_positions, *(_yarn_length(p) for p in _parameters(config) if p["rope_type"] == "yarn")])


def _parameters_of(config: Any, layer: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = config.rope_parameters
    return parameters if layer is None else parameters[layer]


def _parameters(config: Any) -> list[dict[str, Any]]:
    """The rope parameters of a config, one set for each type of layer if those differ."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [p for p in (nested or [parameters]) if "rope_type" in p]


def _scaled_from(config: Any, parameters: dict[str, Any]) -> int:
    """The number of positions up to which the initial scaling applies."""
    if parameters["rope_type"] == "dynamic":
        return int(config.max_position_embeddings)
    return int(parameters["original_max_position_embeddings"])


def _yarn_length(parameters: dict[str, Any]) -> int:
    return int((parameters.get("factor") or 1) * (parameters.get("original_max_position_embeddings") or 0))


def _all_frequencies(rotary: LongRotary, *, is_scaled: bool) -> Iterable[tuple[Tensor, Tensor]]:
    for layer in rotary.kinds:
        yield rotary.frequencies(layer)
        if is_scaled:  # dynamic only lowers frequencies, longrope has a second set
            yield rotary.frequencies(layer, 1 << 40)


def _float32_error(single: Tensor, double: Tensor) -> float:
    """Maximum error of float32 phases in radians per position: the frequency's error, and the product's."""
    return float(((single.double() - double).abs() + single.double() * 2.0**-24).max())
