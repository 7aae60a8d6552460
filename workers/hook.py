"""The attention function that transformers calls in every attention layer.

Registered as an ordinary attention implementation; models are not changed. The step's handle arrives as the forward
argument `step`, so this module holds no state. Nothing is registered for masks: transformers then builds none, and
who sees whom is decided in `workers.inputs`.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "longleaf"
UNSUPPORTED = ("position_bias", "indices", "block_indices", "sinks")
"""What some families hand to attention and what would change its result."""


class Handle(Protocol):
    """What a forward pass carries through the model to every attention layer."""

    def attend(self, layer: int, q_THD: Tensor, k_KTD: Tensor, v_KTV: Tensor, call: "LayerCall") -> Tensor:
        """Attention of this layer's new tokens, [T, H, V]; also stores their keys and values."""
        ...


class LayerCall(NamedTuple):
    """What a layer says about its attention."""

    scale: float
    window: int | None
    softcap: float | None
    """Scores s become softcap * tanh(s / softcap)."""
    sink_H: Tensor | None
    """Per head one more score that takes part in the softmax and gives no value."""
    unsupported: str | None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: Handle,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """Shapes as transformers calls it: query [1, H, T, D], key and value [1, K, T, D or V]; returns [1, T, H, V]."""
    unsupported = next((name for name in UNSUPPORTED if features.get(name) is not None), None)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    call = LayerCall(scale, sliding_window, softcap, s_aux, unsupported)
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    out_THD = step.attend(layer, query[0].transpose(0, 1), key[0], value[0], call)
    return out_THD.unsqueeze(0).to(query.dtype), None


def register() -> None:
    """Makes `attn_implementation="longleaf"` known to transformers."""
    AttentionInterface.register(NAME, attention)
