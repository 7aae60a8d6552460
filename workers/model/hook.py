"""The attention function that transformers calls in every attention layer.

It is registered as an ordinary attention implementation; models are not changed. The step's attention arrives as the
forward argument `step`, or as an attribute of the tensor of positions, so this module holds no state. No mask function
is registered: transformers then builds no masks, and `workers.step.inputs` decides the visible keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "longleaf"
UNSUPPORTED = ("attention_mask", "position_bias", "indices", "block_indices", "sinks")
"""Arguments that some families pass to attention and that would change its result."""


class LayerCall(NamedTuple):
    """The attention parameters of a layer."""

    scale: float
    window: int | None
    softcap: float | None
    """Scores s become softcap * tanh(s / softcap)."""
    sink_H: Tensor | None
    """One additional score per head that takes part in the softmax and contributes no value."""
    unsupported: str | None


Attend = Callable[[int, Tensor, Tensor, Tensor, LayerCall], Tensor]
"""Attention of a layer's new tokens: the layer, q_THD, k_KTD, v_KTV, and the layer's parameters; the result is [T, H,
V]. It also stores the keys and values."""


class PositionCache:
    """Stands in for a cache where a layer asks one for the start position of its rows.

    It holds nothing: keys and values are returned unchanged.
    """

    def __init__(self, positions_T: Tensor) -> None:
        self._offsets_T = positions_T - torch.arange(len(positions_T), device=positions_T.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """The offsets from the index of each row to its position, [T]."""
        return self._offsets_T

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return key, value


def arguments(step: Attend, token_ids_T: Tensor, positions_T: Tensor, *, has_offsets: bool) -> dict[str, Any]:
    """The arguments of a forward pass over rows of any sequences, in any order, that lead back to this module's
    `attention` in every layer.

    Some families (StableLM) drop unknown arguments; positions reach the attention of all that use them. `has_offsets`
    is for families whose layers ask a cache for positions.
    """
    positions_1T = positions_T[None]
    setattr(positions_1T, "step", step)  # noqa: B010
    return {
        "input_ids": token_ids_T[None],
        "position_ids": positions_1T,
        "past_key_values": PositionCache(positions_T) if has_offsets else None,
        "use_cache": False,
        "step": step,
    }


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: Attend | None = None,
    position_ids: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """Shapes as transformers calls it: query [1, H, T, D], key and value [1, K, T, D or V]; returns [1, T, H, V]."""
    attend = step or getattr(position_ids, "step", None)
    if attend is None:
        raise TypeError("it passes neither the step nor the positions to its attention")
    features["attention_mask"] = attention_mask  # no mask is built for this function, so this one was made by the layer
    unsupported = next((name for name in UNSUPPORTED if features.get(name) is not None), None)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    call = LayerCall(scale, sliding_window, softcap, s_aux, unsupported)
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    out_THD = attend(layer, query[0].transpose(0, 1), key[0], value[0], call)
    return out_THD.unsqueeze(0).to(query.dtype), None


def register() -> None:
    """Registers `attn_implementation="longleaf"` with transformers."""
    AttentionInterface.register(NAME, attention)
