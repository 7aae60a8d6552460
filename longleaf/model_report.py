"""Report about a checkpoint before it is served. Sizes in bytes, counts in tokens."""

import msgspec

from longleaf.config import WeightsChoice, WeightsDtype, WindowKeys
from longleaf.fingerprint import Fingerprint
from longleaf.formatting import describe_dtypes


class TextReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of reading config, tokenizer and chat template."""

    reason: str = ""
    """Reason for refusing the checkpoint; empty if it is accepted."""
    architecture: str = ""
    max_positions: int = 0
    """Context length according to the config; 0 if it has none."""
    vocabulary_size: int = 0
    has_chat_template: bool = False


class AttentionKind(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with the same attention pattern."""

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Dim of the values; None: the same as that of the keys."""
    window: int | None = None
    """Sliding window in tokens; None: no window."""
    section: int | None = None
    """Size of the attention chunks, to which a query is restricted; None: no chunks."""


class ReplicatedReport(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of keys and values with `serve --window-keys replicated`."""

    bytes_per_token: int
    """Bytes per token over the full-attention layers, rounded up; 0 if there are none."""
    bytes_per_window: int
    """Bytes on each rank for each position at which a context can be continued: the keys of the largest window."""


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with a recurrent state."""

    layers: tuple[int, ...]
    num_bytes: int
    """Bytes of the states of all of these layers after one position of a sequence, on each rank."""
    one_by_one: tuple[int, ...] = ()
    """Layers that compute the rows of a sequence one at a time; unknown without weights."""


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Pool of one rank, and its capacity in tokens of this model, in whole blocks."""

    rank: int
    kv_bytes: int
    tokens: int


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of a cluster for this model, with the given placement of sliding-window keys."""

    window_keys: WindowKeys
    reason: str = ""
    """Reason why such a cluster cannot start; empty if it can."""
    rooms: tuple[RankPlan, ...] = ()
    tokens: int = 0
    """Total capacity of the pools of all ranks."""
    is_unlimited: bool = False
    """No layer keeps all tokens, so `tokens` only bounds the positions."""
    window_tokens: int = 0
    """Capacity of each rank for sliding-window keys, in tokens; 0 if sharded."""
    ends: int = 0
    """Number of context ends that fit; generations use them too."""
    num_states: int = 0
    """Number of recurrent states that fit: one for each end of a context, and up to three for a generation."""


class GpuPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of GPUs of one size with a rank on each, sharded keys and the default settings of steps. An estimate."""

    num_gpus: int
    total_bytes: int
    """Memory of each GPU."""
    weights: WeightsChoice
    """The weights of each rank; whole if they fit, unless a choice was given."""
    weight_bytes: int
    """Bytes of the weights on each GPU, at most."""
    workspace_bytes: int
    """Bytes that the steps of each rank need beside weights, keys and values."""
    tokens: int
    """Total capacity of all ranks; 0 if weights and workspace exceed the memory."""


class ExchangeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Exchanges between ranks in a decode step."""

    merges: int
    """Merges of partial attention, one per layer; some algorithms need several rounds."""
    gathers: int
    """Gathers of the outputs of sharded linear layers, the head included."""
    sums: int
    """Sums of the addends of sharded MLPs, experts and embeddings."""

    @property
    def whole(self) -> int:
        """The number with whole weights: the merges, and one of the sampled tokens."""
        return self.merges + 1

    @property
    def sharded(self) -> int:
        """The number with sharded weights."""
        return self.whole + self.gathers + self.sums


class AttentionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of loading the checkpoint on a rank."""

    reason: str = ""
    """Reason for refusing the checkpoint; empty if it is accepted."""
    dtype: str = ""
    kv_dtype: str = ""
    """Storage type of keys and values."""
    kinds: tuple[AttentionKind, ...] = ()
    trained: int = 0
    """Context length that the model was trained for, including rope scaling; 0 if unknown."""
    bytes_per_token: int = 0
    """Stored bytes of keys and values per token, over all layers, rounded up."""
    replicated: ReplicatedReport | None = None
    """Set if there are layers without full attention, and none with a recurrent state."""
    states: StateReport | None = None
    """Set if there are layers with a recurrent state."""
    weight_bytes: int = 0
    """Bytes of all weights, which every rank holds unless they are sharded."""
    share_bytes: tuple[int, ...] = ()
    """Bytes of the weights on each rank if they are sharded; empty for one rank."""
    share_note: str = ""
    """Reason why the weights cannot be sharded; empty if they can."""
    spare_ranks: int = 0
    """Number of lost ranks for whose sharded weights the others have room."""
    spare_bytes: int = 0
    """Bytes of that room on each rank, at most. Keys and values do not use it."""
    weights: WeightsChoice = "whole"
    """The weights of each rank in `plans`."""
    weights_dtype: WeightsDtype = "dequantized"
    """Whether quantized weights are stored or dequantized in the memory of ranks, in all sizes."""
    other_bytes: int = 0
    """Bytes of all weights in the other of these two ways; 0 if no weight can remain as stored."""
    exchanges: ExchangeReport | None = None
    """Exchanges of a decode step; None for one rank, and if the weights cannot be sharded."""
    quantized: dict[str, int] = {}
    """Number of stored tensors by quantized layout, such as `fp8 128x128`; empty if the weights are not quantized.
    Products are computed in `dtype`."""
    has_weights: bool = False
    """Whether the weights were loaded."""
    is_exact: bool | None = None
    """Whether logits equal those of plain attention; None if unknown, as without weights. False if they are equal, and
    some answers differ from `generate` for the reason in `exactness_note`."""
    exactness_note: str = ""
    """Reason why it is unknown or False; empty otherwise."""
    plans: tuple[CapacityPlan, ...] = ()
    """For sharded keys, and for replicated windows if there are layers without full attention."""
    gpus: GpuPlan | None = None
    """The capacity of GPUs of 80 GB, also on a machine without any; None if the checkpoint is refused."""

    @property
    def dtypes(self) -> str:
        """The types of the weights and keys, for users."""
        return describe_dtypes(self.dtype, self.kv_dtype)


def describe_layouts(quantized: dict[str, int], dtype: str) -> str:
    """The stored and the computed types of quantized weights."""
    kinds = ", ".join(f"{count} {layout}" for layout, count in quantized.items())
    return f"stored quantized (tensors: {kinds}), computed in {dtype}"


class Dequantized(msgspec.Struct, frozen=True):
    """The GGUF file from which the weights of a checkpoint were dequantized."""

    file: str
    kinds: dict[str, int]
    """Number of tensors by their quantization, such as Q4_K."""
    dtype: str
    """Type of the weights as they were saved."""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a checkpoint is supported, and the resources for serving it."""

    model: str
    is_supported: bool
    """Whether all checks passed. Without weights, exactness was not checked."""
    text: TextReport
    attention: AttentionReport
    fingerprint: Fingerprint | None = None
    """Fingerprint of its folder; None if a file, such as the weights, is missing or unreadable."""
    unread: str = ""
    """The missing or unreadable file; empty if there is a fingerprint."""
    dequantized: Dequantized | None = None
    """Set if the checkpoint was converted from a GGUF file."""

    @property
    def plans(self) -> tuple[CapacityPlan, ...]:
        return self.attention.plans

    @property
    def reasons(self) -> list[str]:
        """Reasons for refusing the checkpoint."""
        return [reason for reason in (self.text.reason, self.attention.reason) if reason]
