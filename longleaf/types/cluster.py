"""The fleet: the model, the ranks, those that were lost, and whether they are exact."""

from typing import Literal

import msgspec

from longleaf.rank_protocol.group_messages import MergeTiming, TierMerge

SlotState = Literal["unspecified", "waiting", "filling", "filled", "given_up"]
"""What became of the place of a lost rank: it stays empty for a while, another process starts there and loads, or has
a rank, or none will. `unspecified` is what a later version of the service may say and this client does not know."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model being served."""

    name: str
    """As given to the service, else that of the checkpoint's folder."""
    architecture: str = ""
    dtype: str = ""
    max_context_tokens: int = 0
    vocabulary_size: int = 0
    has_chat_template: bool = False
    rope: str = ""
    """Kind of the rotary positions, as transformers names it; empty when the model has none."""
    is_long_allowed: bool = False
    """Whether the service takes more than `max_context_tokens`, those that the model was trained for."""
    float32_phase_error: float = 0.0
    """Radians by which the model's own phases are off at the last position that has them, at most."""
    float64_phase_error: float = 0.0
    """Error of float64 phases at 2^24 positions."""
    kv_dtype: str = ""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: where it runs, and what its pool holds."""

    rank: int
    node: str
    pid: int
    device: str
    tokens: int
    max_tokens: int
    kv_bytes: int
    max_kv_bytes: int = 0
    """Size of the pool."""
    kernels: str = ""
    """What computes attention there: `compiled`, `torch`, `flash`, `triton` or `dense`."""
    address: str = ""
    """At which the other ranks reach it."""


class Verify(msgspec.Struct, frozen=True, kw_only=True):
    """A request to hold the fleet against plain attention, over a text or over token ids drawn at random."""

    text: str | None = None
    """Read as it is, without chat template; None draws ids."""
    seed: int = 0
    """Seed of the ids that are drawn."""
    num_tokens: int | None = None
    """How many are drawn; None takes enough for keys on every rank."""
    max_tokens: int | None = None
    """Tokens to decode after the prompt; None takes a few."""
    client: str = ""
    """Whom fair share counts."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The logits of an answer from attention spread over the ranks, beside those of plain attention on rank 0."""

    passed: bool
    """There is no failure, what is judged is within the tolerance, and that is conclusive."""
    max_difference: float
    """Largest absolute difference between two logits, over all compared tokens and the vocabulary, from those of plain
    attention in float32. Judged where `dtype` is float32."""
    tolerance: float
    max_logit: float
    """Largest absolute logit of plain attention."""
    dtype: str
    """Coarsest numeric type on the way."""
    distance: float
    """How far the logits of a token are from those of plain attention in float32, as a share of the spread of those;
    the median over the tokens. Judged where `dtype` is coarser than float32."""
    plain_distance: float
    """The distance of plain attention in `plain_dtype`: what rounding does to this model."""
    plain_dtype: str
    is_conclusive: bool
    """False where there is nothing to compare with, and where rounding explains so much that wrong ranks might pass."""
    worst_index: int
    """Index in the answer of the token at which they differ most."""
    prompt_tokens: int
    compared_tokens: int
    """Tokens of the answer, the first of which follows the prompt."""
    equal_tokens: int
    """Tokens for which both would choose the same token greedily; within the tolerance others are near ties."""
    holding_ranks: int
    """Ranks that held keys of prompt or answer; the keys of others were not tried."""
    world_size: int
    plain_seconds: float
    """How long plain attention took, while all streams waited."""
    failure: str = ""
    """Why there was nothing to compare with."""


class Draining(msgspec.Struct, frozen=True, kw_only=True):
    """How far the end of a service is."""

    open_calls: int
    """Calls that still run; where the answer was waited for, those that had not ended in time."""
    limit: float
    """Seconds that calls may go on at most, from the moment at which draining began."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values that went with lost ranks are computed again, by all that are there."""

    epoch: int
    """The first one after the loss."""
    lost_tokens: int
    recovered_tokens: int
    """Those of the lost ones that are held again."""
    seconds: float
    """How long it has taken by now, or took, from when the loss was noticed."""
    is_over: bool
    """Nothing is missing any more."""
    given_up: tuple[str, ...] = ()
    """Ids of contexts for which the ranks that are left have no room."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that was lost. Times are seconds since the epoch of the calendar."""

    time: float
    """When it was noticed."""
    member: int
    """Number of its process; no other one ever has it."""
    rank: int | None
    """In the epoch that ended with it; None where it was in none."""
    epoch: int
    """0 where it was in none."""
    node: str
    reason: str
    slot: SlotState
    refill_time: float | None = None
    """When another process is started in its place; only with `waiting`."""
    slot_reason: str = ""
    """Why none is; only with `given_up`."""


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """Where contexts lie beside the ranks, as far as keys and values and what a lost catalog is made anew from go."""

    snapshots: str
    """What is written there: `seal`, `demand` or `off`."""
    url: str
    """Without user and password."""
    trouble: str = ""
    """Why nothing can be written now, for people; empty where it can."""


class Drafting(msgspec.Struct, frozen=True, kw_only=True):
    """What drafts, guesses of how answers go on, have brought since the service began."""

    drafted_tokens: int
    """Those that steps have tried."""
    accepted_tokens: int
    """Those of them that became tokens of answers."""
    tokens_per_step: float
    """Tokens of answers by the steps that made them, where a step counts once for each answer in it: 1 without drafts,
    0 before the first."""


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
    """Whether answers are; see Finished."""
    exactness_note: str = ""
    """Why they are not exact; empty where they are."""
    window_keys: str = "sharded"
    """Where keys of windowed layers lie: sharded like all others, or replicated on every rank."""
    window_tokens: int = 0
    """Tokens whose keys of windowed layers every rank holds."""
    max_window_tokens: int = 0
    """Most tokens that the windows' pool can hold; 0 where they are sharded, and for models without such layers."""
    inside_transport: str = ""
    """What carries partials among the ranks of one node; empty where no node has several."""
    between_transport: str = ""
    """What carries them between nodes; empty where there is one."""
    tier_merges: tuple[TierMerge, ...] = ()
    """The merge tier by tier, by number of rows; none at world size 1."""
    recovery: Recovery | None = None
    """The one that goes on, or the last one; None where no rank was lost."""
    losses: tuple[Loss, ...] = ()
    """The last 16 at most, the latest one last."""
    storage: Storage | None = None
    """None without a data folder."""
    drafting: Drafting | None = None
    """None where the service hides it."""
