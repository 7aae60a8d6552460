"""Messages between the coordinator and the ranks.

Every rank receives the same StepPlan; rank 0 answers it. A plan carries no generated ids: ranks keep the last sampled
token of each sequence themselves, so a plan can be sent before the one before it is answered. Ranks execute plans in
the order in which they were sent. Structs are encoded with msgpack.
"""

import math

import msgspec

from longleaf.runs import Run
from longleaf.sampling import Logprobs, Sampling

FLOAT32_POSITIONS = 1 << 17
"""Contexts of up to so many positions have the model's own phases, in float32; longer ones have them in float64."""


class Rope(msgspec.Struct, frozen=True):
    """How positions are rotated: fixed for a context when it is created, because its keys carry it."""

    scaled_for: int = 0
    """Number of positions that the scaling was chosen for, where it depends on that; 0: as the model begins."""
    is_double: bool = False
    """Phases are float64, not the model's own."""


OWN_ROPE = Rope()
"""As the model itself rotates what is short."""


class Rotary(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows of its model's positions. Errors are radians per position, at most."""

    kind: str = ""
    """As transformers names them, such as `yarn`, joined by + where layers differ; empty without rotary positions."""
    trained: int = 0
    """Positions that the model was trained for; 0 when its config does not tell."""
    max_positions: int = 0
    """Past these the model has none, or none that are right, for `reason`; 0: no such limit."""
    reason: str = ""
    scaled_from: int = 0
    """More positions than these have another scaling; 0: the scaling does not depend on their number."""
    is_graded: bool = False
    """Each number of positions past `scaled_from` has a scaling of its own; otherwise all have the same."""
    float32_error: float = 0.0
    """Of the model's own phases against float64."""
    float64_error: float = 0.0


class Windows(msgspec.Struct, frozen=True, kw_only=True):
    """What is held of layers that see only the last keys, when each rank holds these keys itself.

    They lie in a pool of their own, in the same blocks on every rank. A segment has them before its end alone, so only
    from there can it be continued.
    """

    windows: tuple[int, ...] = ()
    """Keys that a query sees, itself included, for each kind of layer that has such a window."""
    sections: tuple[int, ...] = ()
    """Size of the sections that positions are cut into, for each kind of layer that sees its own section alone."""
    num_blocks: int = 0
    """Blocks of the pool."""
    bytes_per_token: int = 0
    """Bytes of keys and values per token on each rank, over these layers."""

    def first(self, position: int) -> int:
        """The first position that a query at `position` sees in any of these layers; never falls when the position
        grows."""
        starts = [position - window + 1 for window in self.windows]
        starts += [position - position % section for section in self.sections]
        return max(0, min(starts))

    @property
    def stride(self) -> int:
        """At multiples of it a query sees itself alone, as where sections begin; 0: nowhere."""
        return 0 if any(window > 1 for window in self.windows) else math.lcm(*self.sections)

    @property
    def span(self) -> int:
        """Keys that a query sees at most, itself included."""
        return max(*self.windows, *self.sections, 0)


EVERY_RANK = -1
"""Instead of the rank of a run that lies in the same blocks on every rank."""


UNLIMITED_TOKENS = 1 << 31
"""Tokens that a rank holds at most where none of their keys takes room for ever, and any number would only be in the
way."""


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """A chunk of prompt tokens, cut over the ranks: each rank computes its piece and keeps its keys."""

    path: tuple[int, ...]
    """Segments the tokens may attend to, in order; the last receives the chunk."""
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    pieces: tuple[Run, ...]
    """Consecutive, covering the chunk, at most one per rank."""
    rope: Rope = OWN_ROPE
    window_runs: tuple[Run, ...] = ()
    """With replicated windows, all runs of EVERY_RANK that the last segment has in this step, in order, in the windows'
    pool: tokens before the chunk that it sees, and those of the chunk that the token after it will see. They replace
    what earlier plans told of this segment."""


class Seen(msgspec.Struct, frozen=True):
    """What penalties must know of a sequence's past. Rank 0 adds the tokens that it samples from then on."""

    token_ids: tuple[int, ...]
    """Distinct ids of context and prompt; empty when no repetition penalty asks for them."""
    generated: tuple[int, ...]
    """Ids of the answer so far, each as often as it was generated."""


class Terms(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the tokens of a sequence are chosen. Told once; rank 0 keeps it until the sequence is released."""

    sampling: Sampling
    """Without stops: those are the coordinator's business."""
    seen: Seen | None = None
    """If the sequence has penalties."""
    reference_ids: tuple[int, ...] = ()
    """If rank 0 shall compare its logits with those of plain attention: the ids before its answer."""


class Row(msgspec.Struct, frozen=True):
    """Tokens of one sequence that every rank computes: the last prompt token, a question, or one decoded token."""

    sequence: int
    path: tuple[int, ...]
    """Segments the tokens may attend to, in order; the last receives the tokens."""
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    """Empty: the one token that was sampled last."""
    runs: tuple[Run, ...]
    """Runs that receive the tokens, with the extent that they have after this step."""
    token_index: int
    """Index in the answer of the token to sample from the last position; -1 samples nothing."""
    terms: Terms | None = None
    """With the first row of a sequence, and with the first one after the sequence was released."""
    num_reference: int = 0
    """Tokens that rank 0 computes once more in this step, alone, to compare the answer that this row completes."""
    rope: Rope = OWN_ROPE
    window_runs: tuple[Run, ...] = ()
    """As of a chunk, but with all tokens of the row."""

    @property
    def num_tokens(self) -> int:
        return max(1, len(self.token_ids))

    @property
    def is_compared(self) -> bool:
        """Whether this row completes an answer that is compared."""
        return self.num_reference > 0


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Replicated rows of one or more sequences."""

    rows: tuple[Row, ...]


class StepPlan(msgspec.Struct, frozen=True, tag="plan"):
    """What every rank must do in one step."""

    epoch: int
    step: int
    work: Prefill | Decode
    release_segments: tuple[int, ...] = ()
    """Segments to forget before the work; their blocks may be handed out again in this very plan."""
    release_sequences: tuple[int, ...] = ()
    """Sequences whose last token, terms and history may be forgotten."""

    @property
    def num_tokens(self) -> int:
        if isinstance(self.work, Prefill):
            return len(self.work.token_ids)
        return sum(row.num_tokens for row in self.work.rows)

    @property
    def num_reference(self) -> int:
        """Tokens that rank 0 computes alone while the others wait, to compare."""
        return 0 if isinstance(self.work, Prefill) else sum(row.num_reference for row in self.work.rows)


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Coordinator to rank: where the process group of this epoch meets. `nodes` names each rank's machine."""

    epoch: int
    host: str
    port: int
    nodes: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Coordinator to rank: leave."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Rank to coordinator: I am here. Rank 0 tells where its store listens (port 0 at world size 1)."""

    rank: int
    node: str
    host: str
    pid: int
    store_port: int = 0


class MergeTiming(msgspec.Struct, frozen=True):
    """How long each merge takes over these ranks, and which of them was therefore chosen."""

    rows: int
    """For up to so many rows."""
    merge: str
    """The choice."""
    microseconds: dict[str, float]
    """Median per call, on the slowest rank, by merge."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Rank to coordinator: the model is loaded and the pool is laid out."""

    rank: int
    device: str
    dtype: str
    num_blocks: int
    """Blocks of the pool that runs may use."""
    bytes_per_token: int
    """Bytes of keys and values per token, over all layers."""
    kv_dtype: str = ""
    """Type in which keys and values are kept."""
    transport: str = ""
    """What carries partials between the ranks; empty at world size 1."""
    merges: tuple[MergeTiming, ...] = ()
    """What was measured when the merge was to be chosen."""
    notes: tuple[str, ...] = ()
    """What the rank logged while it started, for people."""
    rotary: Rotary = Rotary()
    windows: Windows | None = None
    """With replicated windows, if the model has windowed layers; `num_blocks` and `bytes_per_token` are then of the
    other layers alone."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The logits of one answer, from attention spread over the ranks, beside those of plain attention on rank 0."""

    max_difference: float = 0.0
    """Largest absolute difference between two logits, plain attention in float32; NaN where one of them is."""
    max_logit: float = 0.0
    """Largest absolute logit of plain attention."""
    distance: float = 0.0
    """How far the logits of a token are from those of plain attention in float32, as a share of the spread of those:
    norms, and the median over the tokens."""
    plain_distance: float = 0.0
    """The same of plain attention in `plain_dtype`: what rounding does."""
    plain_dtype: str = ""
    """`dtype`, or bfloat16 where that is int8, which plain attention does not know."""
    worst_index: int = 0
    """Index in the answer of the token at which they differ most."""
    num_tokens: int = 0
    """Tokens of the answer that were compared."""
    num_equal: int = 0
    """Those for which both would choose the same token greedily."""
    num_ranks: int = 0
    """Ranks that hold keys of the prompt or the answer."""
    dtype: str = ""
    """Coarsest numeric type on the way: of the weights, of keys and values, or of partials that travel."""
    seconds: float = 0.0
    """How long plain attention took."""
    failure: str = ""
    """Why there is nothing to compare with; empty when there is."""


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """Rank 0 to coordinator: sampled ids by sequence, in the plan's order of rows."""

    epoch: int
    step: int
    token_ids: dict[int, int]
    logprobs: dict[int, Logprobs] = msgspec.field(default_factory=dict[int, Logprobs])
    """Of the sampled ids, by sequence, for those that ask for them."""
    kv_bytes_read: int = 0
    """Bytes of keys and values that rank 0 read from its pool in a decode step, over all layers."""
    seconds: float = 0.0
    """How long rank 0 computed."""
    not_finite: tuple[int, ...] = ()
    """Sequences that have no id, because their logits are NaN or infinite. They cannot go on."""
    has_finite_keys: bool = True
    """Whether all keys and values of a chunk are finite, on all ranks; if not, nobody may read it."""
    comparisons: dict[int, Comparison] = msgspec.field(default_factory=dict[int, Comparison])
    """By sequence, of the answers that this step completed and that are compared; their seconds count in `seconds`."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Any rank to coordinator: an exception ended this rank. `refused` marks settings or a model that cannot work,
    `blamed` is another rank that this one saw gone."""

    rank: int
    reason: str
    refused: bool = False
    blamed: int | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Any rank to coordinator, once a second, from a thread of its own."""

    rank: int


ToRank = StepPlan | Join | Stop
FromRank = Hello | Ready | StepResult | Failed | Heartbeat


def encode(message: ToRank | FromRank) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """Raises msgspec.DecodeError on anything else."""
    return msgspec.msgpack.decode(data, type=ToRank)


def decode_from_rank(data: bytes | memoryview) -> FromRank:
    """Raises msgspec.DecodeError on anything else."""
    try:
        return msgspec.msgpack.decode(data, type=FromRank)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
