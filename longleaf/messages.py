"""What clients and service say to each other, as plain structs. Counts are in tokens, sizes in bytes, times in seconds.

`longleaf.codec` alone turns them into protobuf messages and back.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from longleaf.sampling import Logprobs, Sampling
from longleaf.step import MergeTiming

FinishReason = Literal["end_token", "stop", "length", "stop_token"]
IngestPhase = Literal["receiving", "tokenizing", "prefilling", "ready"]


class SamplingOptions(TypedDict, total=False):
    """Sampling as a caller gives it: what is left out is chosen by the service (greedy, 128 tokens, a random seed)."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop: tuple[str, ...] | list[str] | None
    ignore_end_token: bool | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[int, float] | None
    stop_tokens: tuple[int, ...] | list[int] | None
    num_logprobs: int | None


class GenerateOptions(SamplingOptions, total=False):
    """All that a caller may say about a generation besides its input."""

    use_chat_template: bool | None
    """Whether a plain prompt is put into the model's chat template; None: if it has one."""
    num_samples: int
    """Answers to the same prompt, which is read once."""
    priority: int
    """Higher goes first."""
    client: str
    """Whom fair share counts; the address of the peer when empty."""
    request_id: str
    """Names the generation, so that it never runs twice."""
    resumable: bool
    """When the stream breaks, the client goes on with it where it broke."""
    timeout: float | None
    """Seconds for the whole call."""


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """A request to generate; `input` is text, or token ids that are used as they are."""

    input: str | tuple[int, ...]
    context: str | None = None
    """Id of the context to ask, without the `contexts/` prefix."""
    use_chat_template: bool | None = None
    sampling: Sampling
    num_samples: int = 1
    request_id: str = ""
    """Names the generation; the service makes one when empty."""
    resume_seconds: float = 0.0
    """How long the generation is held when nobody reads it."""
    priority: int = 0
    client: str = ""
    """Whom fair share counts; the address of the peer when empty."""


class Resume(msgspec.Struct, frozen=True):
    """A request to go on with a generation, after `token_index` tokens of all its samples together."""

    request_id: str
    token_index: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one generation; the cached ones are part of the prompt's."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Timings(msgspec.Struct, frozen=True):
    """Queue and first token count from arrival, prefill from the end of the queue to the first token; decode from
    there to the last."""

    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0


class Started(msgspec.Struct, frozen=True):
    """The request was admitted; comes again when its place in the queue changes: 1 is next, 0 has begun."""

    prompt_tokens: int
    cached_tokens: int
    queue_position: int = 0
    request_id: str = ""
    is_beyond_trained: bool = False
    """Prompt and answer may go beyond the positions that the model was trained for."""
    is_exact: bool = False
    """Whether the answer will be; see Finished."""


class Progress(msgspec.Struct, frozen=True):
    """The prompt is being read."""

    processed: int
    total: int


class Delta(msgspec.Struct, frozen=True):
    """A piece of the answer: whole characters, and the tokens that carry them. `index` is that of the first token.

    `logprobs` has one entry for each token, or none when they were not asked for.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...] = ()
    sample: int = 0


class Finished(msgspec.Struct, frozen=True):
    """The end of the answer. `matched_stop` is empty unless the reason is `stop`."""

    reason: FinishReason
    matched_stop: str = ""
    usage: Usage = Usage()
    timings: Timings = Timings()
    sample: int = 0
    is_exact: bool = False
    """No key, value or partial was rounded more than the model itself rounds."""


Event = Started | Progress | Delta | Finished


class RankShare(msgspec.Struct, frozen=True):
    """What one rank holds of a context."""

    rank: int
    tokens: int
    kv_bytes: int


class PositionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How the positions of a context are told to the model; fixed when it is created, for its keys carry it."""

    capacity: int = 0
    """Most tokens that the context, what is asked and what is answered may have together."""
    rope: str = ""
    """Kind of the rotary positions, as transformers names it, such as `yarn`; empty when the model has none."""
    precision: Literal["float32", "float64"] = "float32"
    """Numeric type of the phases; float32 are the model's own."""
    scaled_for: int = 0
    """Positions for which the scaling was chosen; 0: as the model begins."""
    phase_error: float = 0.0
    """Radians by which the phases of the tokens held are off, at most."""
    is_beyond_trained: bool = False
    """It holds more tokens than the model was trained for."""


class Context(msgspec.Struct, frozen=True):
    """A context. `created`, `updated` and `expires` (None: never) are seconds since the epoch."""

    id: str
    tokens: int
    kv_bytes: int
    created: float
    updated: float
    shares: tuple[RankShare, ...] = ()
    display_name: str = ""
    expires: float | None = None
    is_pinned: bool = False
    positions: PositionInfo = PositionInfo()
    is_exact: bool = False
    """Its keys and values are those that the model alone would have computed."""


class ContextSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a client decides about a context. What is unset stays as it is: at first no name, no expiry, no pin."""

    display_name: str | UnsetType = UNSET
    is_pinned: bool | UnsetType = UNSET
    expires: float | UnsetType | None = UNSET
    """Seconds since the epoch; None means never."""
    ttl: float | UnsetType = UNSET
    """Seconds until it expires, from now or from the acknowledgement of its ingest; instead of `expires`."""
    capacity: int | UnsetType = UNSET
    """Most tokens that it will have with what is asked and answered; of a new context, and never changed."""


UNCHANGED = ContextSettings()


class ContextOptions(TypedDict, total=False):
    """ContextSettings as a caller gives them."""

    display_name: str
    is_pinned: bool
    expires: float | None
    ttl: float
    capacity: int


class IngestOptions(ContextOptions, total=False):
    """All that a caller may say about an ingest besides its document."""

    append: bool
    """To an existing context."""
    upload_id: str
    """Names the ingest, so that it can be resumed."""
    priority: int
    """Higher goes first."""
    client: str
    """Whom fair share counts; the address of the peer when empty."""
    timeout: float | None
    """Seconds for the whole call."""


class ForkContext(msgspec.Struct, frozen=True):
    """A request for a context of the first `tokens` tokens of another one; None takes all."""

    source: str
    context: str
    tokens: int | None = None


class IngestHeader(msgspec.Struct, frozen=True):
    """The first message of an ingest. `total_bytes` is None when the size is not known beforehand; an `upload_id`
    makes the ingest resumable."""

    context: str
    append: bool = False
    total_bytes: int | None = None
    upload_id: str = ""
    settings: ContextSettings = UNCHANGED
    priority: int = 0
    client: str = ""
    """Whom fair share counts; the address of the peer when empty."""


IngestPiece = IngestHeader | bytes | Sequence[int]


class IngestProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far an ingest is; `context` comes with the phase `ready`. `total` is 0 while it is not known.

    Of the first one, `received_bytes` and `received_tokens` (for token ids) tell where to send from."""

    phase: IngestPhase
    received_bytes: int = 0
    received_tokens: int = 0
    processed: int = 0
    total: int = 0
    tokens_per_second: float = 0.0
    context: Context | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """The tokens of a text. `spans`, if asked for: each token's first character, and the one after its last."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] | None = None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model being served."""

    name: str
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
    """The same of float64 at 2^24 positions."""
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


class Verify(msgspec.Struct, frozen=True, kw_only=True):
    """A request to hold the fleet against plain attention, over a text or over token ids drawn at random."""

    text: str | None = None
    """Read as it is, without chat template; None draws ids."""
    seed: int = 0
    """Of the ids that are drawn."""
    num_tokens: int | None = None
    """How many are drawn; None takes enough for keys on every rank."""
    max_tokens: int | None = None
    """Tokens to decode after the prompt; None takes a few."""
    client: str = ""
    """Whom fair share counts."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The logits of an answer from attention spread over the ranks, beside those of plain attention on rank 0."""

    passed: bool
    """There is no failure, and the largest difference is within the tolerance."""
    max_difference: float
    """Largest absolute difference between two logits, over all compared tokens and the vocabulary."""
    tolerance: float
    max_logit: float
    """Largest absolute logit of plain attention; the tolerance is a share of it, by numeric type."""
    dtype: str
    """Coarsest numeric type on the way."""
    worst_index: int
    """Index in the answer of the token at which they differ most."""
    prompt_tokens: int
    compared_tokens: int
    """Tokens of the answer, the first of which follows the prompt."""
    equal_tokens: int
    """Those for which both would choose the same token greedily; within the tolerance others are near ties."""
    holding_ranks: int
    """Ranks that held keys of prompt or answer; the keys of others were not tried."""
    world_size: int
    plain_seconds: float
    """How long plain attention took, while all streams waited."""
    failure: str = ""
    """Why there was nothing to compare with."""


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
