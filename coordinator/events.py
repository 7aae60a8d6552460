"""What goes into the engine and what comes out, in token ids; text is the business of `coordinator.generation`."""

from typing import Literal

import msgspec

from longleaf.sampling import Sampling

EndReason = Literal["end_token", "length"]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A generation to run: `token_ids` after the context (or alone)."""

    context: str | None
    """Id of the context to ask, without the `contexts/` prefix."""
    token_ids: tuple[int, ...]
    sampling: Sampling
    end_tokens: frozenset[int] = frozenset()
    """Ids that end the generation unless sampling.ignore_end_token; the end token itself is reported."""
    priority: int = 0
    """Higher goes first."""
    client: str = ""
    """Whom fair share counts."""
    deadline: float | None = None
    """When nobody waits for the answer any more, in seconds on the engine's clock."""


class Started(msgspec.Struct, frozen=True):
    """Admitted. Counts are in tokens; cached ones are part of the prompt. Told again when the position changes, when
    the job begins, and when it is preempted."""

    prompt_tokens: int
    cached_tokens: int
    queue_position: int = 0
    """1 is next in the queue; 0 has begun."""


class Progress(msgspec.Struct, frozen=True):
    """`processed` of `total` prompt (or document) tokens have their keys and values by now."""

    processed: int
    total: int


class Tokens(msgspec.Struct, frozen=True):
    """Generated ids; `index` is the index in the answer of the first one."""

    index: int
    token_ids: tuple[int, ...]


class Ended(msgspec.Struct, frozen=True):
    """The last event of a stream. Times in seconds."""

    reason: EndReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_seconds: float
    first_token_seconds: float
    decode_seconds: float


Event = Started | Progress | Tokens | Ended


class RankShare(msgspec.Struct, frozen=True):
    """What one rank holds of a context, in tokens."""

    rank: int
    tokens: int


class ContextView(msgspec.Struct, frozen=True):
    """A context as clients see it. Times in seconds since the epoch."""

    id: str
    tokens: int
    kv_bytes: int
    created: float
    updated: float
    shares: tuple[RankShare, ...]


class WorkerView(msgspec.Struct, frozen=True):
    """A rank as clients see it. Capacity and content of its pool in tokens, size in bytes."""

    rank: int
    node: str
    pid: int
    device: str
    tokens: int
    max_tokens: int
    kv_bytes: int


class ClusterView(msgspec.Struct, frozen=True):
    """The ranks and the load."""

    workers: tuple[WorkerView, ...]
    epoch: int
    waiting: int
    running: int
