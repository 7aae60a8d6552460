"""Inputs and outputs of the engine, in token ids. `coordinator.handlers` converts text."""

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from longleaf.document_text import DocumentText
from longleaf.errors import LongleafError
from longleaf.rank_protocol.step import Attention
from longleaf.rank_protocol.verdict import Verification
from longleaf.sampling import SamplingParams, Token
from longleaf.types import UNCHANGED, ContextSettings, Progress, Recovering, SchedulingOptions, TokenRange

if TYPE_CHECKING:
    from coordinator.scheduling.jobs import IngestJob

EndReason = Literal["end_token", "stop", "length", "stop_token"]
"""`stop`: the grammar of the answer allows no further text."""


class SchedulingParams(SchedulingOptions, frozen=True, kw_only=True):
    """Scheduling parameters of a request, with those that the service sets."""

    deadline: float | None = None
    """Time at which the client stops waiting, in seconds on the engine's clock."""
    max_concurrent: int | None = None
    """Maximum number of generations of the tenant that run concurrently; None: no limit per tenant."""
    is_alone: bool = True
    """Whether no other tenant can send requests, so that this one may fill the queue."""
    is_resumable: bool = False
    """Whether the generation is held. The deadline then only decides whether the request may start: readers connect and
    disconnect, and the holder of the generation ends it."""

    @property
    def end(self) -> float | None:
        """Time at which the engine ends the request in any state; None if the holder ends it."""
        return None if self.is_resumable else self.deadline

    def outranks(self, other: "SchedulingParams") -> bool:
        """Whether this request has the higher priority. Priorities apply only within a tenant."""
        return self.tenant == other.tenant and self.priority > other.priority


DEFAULT_SCHEDULING = SchedulingParams()


STATES_HIDE_NOTHING = "the model has recurrent states, in which tokens cannot be hidden"
"""The reason why tokens of a context cannot be hidden."""


class AttributionContext(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a context, and its limits for attribution."""

    segments: tuple[int, ...]
    """Ids of the segments on its path."""
    ends: tuple[int, ...]
    """Position up to which each segment is used."""
    num_opening: int
    """Tokens at its start that are no source: the chat template before the first document, or attention sinks."""
    owner: object
    """Exists as long as any context that ends in the same segment, which never changes."""
    block_size: int
    """Tokens of a block; a multiple of the tokens of a span."""
    full_layers: tuple[int, ...]
    """Layers with full attention."""
    has_states: bool = False
    """Whether the model has recurrent states, in which no token can be hidden."""

    @property
    def end(self) -> int:
        """Tokens of the context."""
        return self.ends[-1]

    def cut(self, end: int) -> "ContinuationPoint":
        """The point after the first `end` tokens of the context."""
        starts = (0, *self.ends)
        return ContinuationPoint(
            tuple(each for each, start in zip(self.segments, starts, strict=False) if start < end), end
        )


class ContinuationPoint(msgspec.Struct, frozen=True):
    """Position in a context at which a prompt continues: after `end` tokens, provided the context still begins with
    these segments."""

    segments: tuple[int, ...]
    end: int


class SpanLayout(msgspec.Struct, frozen=True):
    """The division of a context into spans, and the layers whose attention is reported."""

    size: int
    """Tokens of a span."""
    layers: tuple[int, ...] = ()
    """Layers whose attention is reported; empty: all layers with full attention."""
    num_spans: int = 0
    """Number of spans in the context."""
    num_opening: int = 0
    """Tokens at the start of the context that belong to no span."""


class ProbeResult(msgspec.Struct, frozen=True):
    """The result of a probe."""

    scores: tuple[float, ...] = ()
    """Natural log probabilities of the scored tokens, under the distribution of the model before sampling parameters
    apply."""
    attention: Attention | None = None
    """Mean over the rows of the probe."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A generation or a probe. A generation prefills `token_ids`, after the context if there is one, and generates. A
    probe only prefills them."""

    context: str | None
    """Id of the context to query, without the `contexts/` prefix."""
    token_ids: Sequence[int]
    sampling: SamplingParams
    end_tokens: frozenset[int] = frozenset()
    """Ids that end the generation unless sampling.ignore_end_token; the end token itself is reported."""
    num_samples: int = 1
    """Number of answers. Answer i is sampled with the seed of `sampling` plus i."""
    max_draft_tokens: int = 0
    """Maximum number of draft tokens per answer and step."""
    grammar: str = ""
    """The grammar that constrains the answers; empty: none. It requires end tokens, which must not be ignored."""
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    is_compared: bool = False
    """Whether to compare the logits with those of plain attention. The prompt neither uses nor creates shared keys."""
    generated: Mapping[int, Sequence[int]] | None = None
    """Token ids generated so far, by sample, for a generation that is resumed. Samples without an entry have ended.
    None: all samples are new."""
    cuts: SpanLayout | None = None
    """Report for each token the share of its attention that fell on each span of the context."""
    hidden: tuple[TokenRange, ...] = ()
    """Ranges of the context, in order, that are masked. The keys of the prompt are not shared."""
    beginning: ContinuationPoint | None = None
    """Position to continue from, if not the current end of the context."""
    is_probe: bool = False
    """Whether this is a probe. It scores its last `num_scored` tokens, and returns the mean attention of its last
    `num_reported` tokens."""
    num_scored: int = 0
    """Number of tokens, at the end of a probe, to score."""
    num_reported: int = 0
    """Number of tokens, at the end of a probe with `cuts`, whose attention is reported."""

    @property
    def is_whole(self) -> bool:
        """Whether the prompt sees all of the context and reports nothing about parts of it, so that the context may be
        recomputed as part of the prompt."""
        return not (self.hidden or self.cuts or self.beginning or self.is_probe)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of an answer."""
        return 0 if self.is_probe else self.sampling.max_tokens

    @property
    def num_rows(self) -> int:
        """Minimum number of tokens, at the end of the prompt, that are computed as rows with an output."""
        return max(1, self.num_scored + 1 if self.num_scored else 0, self.num_reported)

    @property
    def num_open(self) -> int:
        """Number of answers that have not ended."""
        return self.num_samples if self.generated is None else len(self.generated)

    @property
    def num_left(self) -> int:
        """Maximum number of tokens that any open answer may still generate."""
        answers = () if self.generated is None else self.generated.values()
        return self.sampling.max_tokens - min(map(len, answers), default=0)

    def end_reason(self, token_id: int, num_generated: int) -> EndReason | None:
        """The reason for which `token_id` ends an answer of `num_generated` tokens, itself included; None if it does
        not."""
        if token_id in self.end_tokens and not self.sampling.ignore_end_token:
            return "end_token"
        if token_id in self.sampling.stop_tokens:
            return "stop_token"
        return "length" if num_generated >= self.sampling.max_tokens else None


class DocumentPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens to append to a context, or to create one from."""

    context: str
    """Id of the context, without the `contexts/` prefix."""
    token_ids: Sequence[int]
    append: bool = False
    """Append to an existing context; otherwise create a new one."""
    settings: ContextSettings = UNCHANGED
    """Settings of the context to create."""
    upload_id: str = ""
    """The client's id of this ingest; empty if it has none."""
    text: DocumentText | None = None
    """The source text of the tokens, if known."""
    scheduling: SchedulingParams = DEFAULT_SCHEDULING


class DocumentPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a context that came from one document."""

    token_ids: "array[int]"
    """All ids of the document; the context may have only the first `num_tokens`."""
    num_tokens: int
    text: DocumentText | None


class Admitted(msgspec.Struct, frozen=True):
    """The request is admitted. Counts are in tokens; `prompt_tokens` includes the cached ones. The event is repeated
    when the queue position changes, when the request starts, and when it is preempted."""

    prompt_tokens: int
    cached_tokens: int
    queue_position: int = 0
    """1 is next in the queue; 0 is running."""
    is_beyond_trained: bool = False
    """Whether prompt and answer may exceed the positions that the model was trained for."""


class Tokens(msgspec.Struct, frozen=True):
    """Generated tokens; `index` is the index of the first one in the answer."""

    index: int
    tokens: tuple[Token, ...]
    sample: int = 0
    attention: tuple[Attention, ...] = ()
    """Attention of the row that produced each token, if the prompt requested it."""
    num_drafted: int = 0
    """Number of tokens drafted in the steps that produced these tokens."""
    num_accepted: int = 0
    """Number of these tokens that were accepted drafts."""
    step_ends: tuple[int, ...] = ()
    """Cumulative number of tokens after each step except the last one; empty for one step."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)

    def joined(self, step: "Tokens") -> "Tokens":
        """These tokens, and those of the step that follows."""
        return Tokens(
            self.index,
            self.tokens + step.tokens,
            self.sample,
            self.attention + step.attention,
            self.num_drafted + step.num_drafted,
            self.num_accepted + step.num_accepted,
            (*self.step_ends, len(self.tokens)),
        )


class Ended(msgspec.Struct, frozen=True):
    """The last event of a sample, and of the stream when all samples have ended. Times in seconds."""

    reason: EndReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_seconds: float
    first_token_seconds: float
    decode_seconds: float
    sample: int = 0
    comparison: Verification | None = None
    """Present if the prompt requested it."""
    found: ProbeResult | None = None
    """The result of a probe."""


class ContextDropped(msgspec.Struct, frozen=True):
    """A context that was dropped because the remaining ranks cannot hold it."""

    context: str
    """Id of the context, without the `contexts/` prefix."""
    num_tokens: int
    reason: str


class Failed(msgspec.Struct, frozen=True):
    """A sample has ended with an error. The stream raises the error when all samples have ended."""

    error: LongleafError
    sample: int = 0


class Sealed(msgspec.Struct, frozen=True):
    """The document of an ingest has been prefilled and is waiting to be persisted. The engine keeps this event: see
    `Scheduler.acknowledge`."""

    job: "IngestJob"


class Acknowledged(msgspec.Struct, frozen=True):
    """The document of an ingest is part of its context."""

    context: str


Event = Admitted | Progress | Recovering | Tokens | Ended
Outcome = tuple[int, Event | Failed | Sealed | Acknowledged | LongleafError]
"""Id of a request, and its next event. Its last event is an error, Ended or Failed of its last sample, or
Acknowledged."""
