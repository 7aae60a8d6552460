"""The cluster: model, ranks, lost ranks, exactness and load."""

from typing import Literal

import msgspec

from longleaf.formatting import describe_dtypes
from longleaf.rank_protocol.group_messages import MergeTiming, TierMerge

SlotState = Literal["unspecified", "waiting", "starting", "replaced", "abandoned"]
"""State of the slot of a lost rank: `waiting` (empty for now), `starting` (a new process is starting and loading),
`replaced`, or `abandoned`. `unspecified` is a state that this client version does not know."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model being served."""

    name: str
    """The name given to the service, else the name of the checkpoint folder."""
    architecture: str = ""
    dtype: str = ""
    max_context_tokens: int = 0
    vocabulary_size: int = 0
    has_chat_template: bool = False
    rope: str = ""
    """Type of the rotary embedding, as transformers names it; empty if the model has none."""
    is_long_allowed: bool = False
    """Whether the service accepts more than `max_context_tokens`, the length that the model was trained for."""
    float32_phase_error: float = 0.0
    """Upper bound of the error of the model's own phases at its last position, in radians."""
    float64_phase_error: float = 0.0
    """Error of float64 phases at 2^24 positions, in radians."""
    kv_dtype: str = ""
    quantization: str = ""
    """Method by which the weights of the checkpoint are quantized, such as fp8: they are dequantized to `dtype`, and
    exact means equal to the dequantized model. Empty if they are not quantized."""

    @property
    def dtypes(self) -> str:
        """The types of the weights and keys, for users."""
        return describe_dtypes(self.dtype, self.kv_dtype, self.quantization)


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its machine, and the contents of its pool."""

    rank: int
    node: str
    pid: int
    device: str
    tokens: int
    max_tokens: int
    kv_bytes: int
    max_kv_bytes: int = 0
    """Capacity of the pool."""
    kernels: str = ""
    """Attention implementation: `compiled`, `torch`, `flash`, `triton` or `dense`."""
    address: str = ""
    """Address at which the other ranks reach this rank."""
    weight_bytes: int = 0
    """Bytes of the model's weights."""
    weight_parts: int = 0
    """Parts of 240 of the weights, if they are sharded; 0: the rank holds all weights."""


class Verify(msgspec.Struct, frozen=True, kw_only=True):
    """A request to compare the cluster with plain attention, on a text or on random token ids."""

    text: str | None = None
    """Used without chat template; None draws random ids."""
    seed: int = 0
    """Seed of the random ids."""
    num_tokens: int | None = None
    """Number of random ids; None draws enough for every rank to have keys."""
    max_tokens: int | None = None
    """Tokens to decode after the prompt; None decodes a small default number."""
    client: str = ""
    """Client name for fair sharing."""


class Draining(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a shutdown."""

    open_calls: int
    """Running calls; with `wait`, the calls that had not finished in time."""
    limit: float
    """Seconds that calls may run after the start of the drain; 1,000,000: until they end."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Recomputation, on all present ranks, of the keys and values that lost ranks held."""

    epoch: int
    """The first epoch after the loss."""
    lost_tokens: int
    recovered_tokens: int
    """Lost tokens that have been recomputed."""
    seconds: float
    """Duration so far, or in total, since the loss was detected."""
    is_done: bool
    """Whether nothing is missing any more."""
    dropped_contexts: tuple[str, ...] = ()
    """Ids of the contexts for which the remaining ranks have no space."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A lost rank. Times are in seconds since the Unix epoch."""

    time: float
    """Time of detection."""
    member: int
    """Number of its process; never reused."""
    rank: int | None
    """Rank number in the epoch that ended with the loss; None if it was in no epoch."""
    epoch: int
    """0 if it was in no epoch."""
    node: str
    reason: str
    slot: SlotState
    retry_time: float | None = None
    """Time at which a replacement process will be started; only for `waiting`."""
    slot_reason: str = ""
    """Reason why there is no replacement; only for `abandoned`."""


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """Storage of snapshots: keys and values, and the data from which a lost catalog can be rebuilt."""

    snapshots: str
    """When snapshots are written: `seal`, `demand` or `off`."""
    url: str
    """Without user and password."""
    error: str = ""
    """Human-readable reason why writes fail now; empty if they succeed."""


class Drafting(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding statistics since the service started."""

    drafted_tokens: int
    """Draft tokens that steps have verified."""
    accepted_tokens: int
    """Draft tokens that were accepted."""
    tokens_per_step: float
    """Answer tokens per step, where a step counts once for each answer in it: 1 without drafts, 0 before the first
    step."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The model, the ranks and the load."""

    model: ModelInfo
    workers: tuple[Worker, ...]
    world_size: int
    epoch: int
    launcher: str
    merge: str
    transport: str = ""
    merge_timings: tuple[MergeTiming, ...] = ()
    waiting: int = 0
    running: int = 0
    block_size: int = 0
    """Tokens per block of the ranks' pools."""
    is_exact: bool = False
    """Whether answers are exact; see Finished."""
    exactness_note: str = ""
    """Reason why answers are not exact; empty if they are."""
    dequantization: str = ""
    """The stored layout and the computed type of quantized weights; see Finished."""
    window_keys: str = "sharded"
    """Placement of the keys of sliding-window layers: sharded like all others, or replicated on every rank."""
    window_tokens: int = 0
    """Tokens whose sliding-window keys every rank holds."""
    max_window_tokens: int = 0
    """Capacity of the sliding-window pool in tokens; 0 if sharded, and for models without such layers."""
    states: int = 0
    """Recurrent states in use, for contexts and requests. Every rank holds all of them."""
    max_states: int = 0
    """Capacity of the pool of recurrent states; 0 for models without any."""
    state_bytes: int = 0
    """Bytes of one recurrent state on each rank; 0 for models without any."""
    intra_node_transport: str = ""
    """Transport of partials between the ranks of one node; empty if no node has several."""
    inter_node_transport: str = ""
    """Transport of partials between nodes; empty if there is only one."""
    tier_merges: tuple[TierMerge, ...] = ()
    """The merge algorithm per tier and number of rows; empty at world size 1."""
    recovery: Recovery | None = None
    """The current or the last recovery; None if no rank was lost."""
    losses: tuple[Loss, ...] = ()
    """At most 32, the latest one last."""
    storage: Storage | None = None
    """None without a data folder."""
    drafting: Drafting | None = None
    """None if the service does not publish it."""
    missing_weights: float = 0.0
    """The fraction of sharded weights that no rank holds, while all answers wait for it."""
