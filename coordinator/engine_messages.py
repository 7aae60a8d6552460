"""What goes into the engine and what comes out, in token ids; text is the business of `coordinator.handlers`."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from longleaf.document_text import DocumentText
from longleaf.errors import LongleafError
from longleaf.rank_protocol.step import Attention, ComparisonRow
from longleaf.sampling import Sampling, Token
from longleaf.types import UNCHANGED, ContextSettings, Progress, Recovering, SchedulingOptions, TokenRange

EndReason = Literal["end_token", "length", "stop_token"]


class SchedulingClaim(SchedulingOptions, frozen=True, kw_only=True):
    """What a request may claim against others."""

    deadline: float | None = None
    """When nobody waits for it any more, in seconds on the engine's clock."""
    at_once: int | None = None
    """Generations of the tenant that may run at once; None: no limit of its own."""
    is_alone: bool = True
    """No other tenant may ask for anything: it may fill the queue."""
    is_held: bool = False
    """The deadline only tells whether it may begin: readers come and go, and whoever holds it for them ends it."""

    @property
    def end(self) -> float | None:
        """When the request is ended, wherever it is; None while somebody else sees to that."""
        return None if self.is_held else self.deadline

    def outranks(self, other: "SchedulingClaim") -> bool:
        """By its priority, which counts inside of a tenant alone."""
        return self.tenant == other.tenant and self.priority > other.priority


NO_CLAIM = SchedulingClaim()


class AttributionContext(msgspec.Struct, frozen=True, kw_only=True):
    """A context as it is now, and what can be told of where answers about it come from."""

    segments: tuple[int, ...]
    """Ids of those that its path leads through."""
    ends: tuple[int, ...]
    """Position up to which each of them is used."""
    last_ids: Sequence[int]
    """Of its last tokens, at most LAST_IDS."""
    block_size: int
    """Tokens of a block, which spans divide."""
    full_layers: tuple[int, ...]
    """Layers that see all keys."""
    can_cut: bool
    """A prompt may go on from anywhere in the context."""

    @property
    def end(self) -> int:
        """Tokens of the context."""
        return self.ends[-1]

    def cut(self, end: int) -> "ContinuationPoint":
        """The first tokens of the context."""
        starts = (0, *self.ends)
        return ContinuationPoint(
            tuple(each for each, start in zip(self.segments, starts, strict=False) if start < end), end
        )


LAST_IDS = 16


class ContinuationPoint(msgspec.Struct, frozen=True):
    """Where a prompt goes on in a context that may be another one by now: after so many tokens, if it still begins with
    these segments."""

    segments: tuple[int, ...]
    end: int


class SpanLayout(msgspec.Struct, frozen=True):
    """How a context is cut into spans, and what counts of what falls on them."""

    size: int
    """Tokens of a span."""
    layers: tuple[int, ...] = ()
    """Those that count; empty: all that see all keys."""
    num_spans: int = 0
    """Of the context."""


class ProbeResult(msgspec.Struct, frozen=True):
    """What a probe has found."""

    scores: tuple[float, ...] = ()
    """Natural logarithms of the probabilities of the tokens that were scored, by the model's own distribution."""
    attention: Attention | None = None
    """Of its rows in the mean."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A generation to run: `token_ids` after the context (or alone); or a probe, which reads them and answers
    nothing."""

    context: str | None
    """Id of the context to ask, without the `contexts/` prefix."""
    token_ids: Sequence[int]
    sampling: Sampling
    end_tokens: frozenset[int] = frozenset()
    """Ids that end the generation unless sampling.ignore_end_token; the end token itself is reported."""
    num_samples: int = 1
    """Answers, each with its own tokens; number i is drawn with the seed i above that of sampling."""
    max_draft_tokens: int = 0
    """Most tokens to draft for an answer in a step."""
    claim: SchedulingClaim = NO_CLAIM
    is_compared: bool = False
    """Compare its logits with those of plain attention. Such a prompt reads no keys of others, and leaves none."""
    generated: Mapping[int, Sequence[int]] | None = None
    """Where answers go on that were told in part: their ids so far, by sample. Samples that are not in it have ended.
    None: all begin."""
    cuts: SpanLayout | None = None
    """Tell of each token how much of the attention that produced it fell on which span of the context."""
    hidden: tuple[TokenRange, ...] = ()
    """Tokens of the context that nothing reads, in order. Nobody else reads the keys of such a prompt."""
    beginning: ContinuationPoint | None = None
    """Where it goes on, if not at the end of the context as it is."""
    is_probe: bool = False
    """Answers nothing: scores its last tokens, or else tells where all of its tokens attended in the mean."""
    num_scored: int = 0
    """So many of a probe's last tokens are scored."""

    @property
    def is_whole(self) -> bool:
        """Reads all of the context and reports nothing of its parts: it may as well read the tokens themselves."""
        return not (self.hidden or self.cuts or self.beginning or self.is_probe)

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer."""
        return 0 if self.is_probe else self.sampling.max_tokens

    @property
    def num_rows(self) -> int:
        """So many of its last tokens at least are computed as rows, which say something."""
        if not self.is_probe:
            return 1
        return self.num_scored + 1 if self.num_scored else len(self.token_ids)

    @property
    def num_open(self) -> int:
        """Answers that are to come, or to go on."""
        return self.num_samples if self.generated is None else len(self.generated)

    @property
    def num_left(self) -> int:
        """Tokens that each of these may still have, at most."""
        reported = () if self.generated is None else self.generated.values()
        return self.sampling.max_tokens - min(map(len, reported), default=0)

    def end_reason(self, token_id: int, num_generated: int) -> EndReason | None:
        """Why `token_id` ends an answer that has `num_generated` tokens with it; None when it does not."""
        if token_id in self.end_tokens and not self.sampling.ignore_end_token:
            return "end_token"
        if token_id in self.sampling.stop_tokens:
            return "stop_token"
        return "length" if num_generated >= self.sampling.max_tokens else None


class DocumentPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens to read into a context."""

    context: str
    """Id of the context, without the `contexts/` prefix."""
    token_ids: Sequence[int]
    append: bool = False
    """Whether the tokens go on the end of a context that is there; else they begin a new one."""
    settings: ContextSettings = UNCHANGED
    """Settings of the context that is created."""
    upload_id: str = ""
    """What its client calls this ingest, if anything."""
    text: DocumentText | None = None
    """Which text the tokens are, where that is known."""
    claim: SchedulingClaim = NO_CLAIM


class DocumentPart(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one document that a context has."""

    token_ids: "array[int]"
    """All of the document's; the context may have only the first `num_tokens`."""
    num_tokens: int
    text: DocumentText | None


class Admitted(msgspec.Struct, frozen=True):
    """Admitted. Counts are in tokens; cached ones are part of the prompt. Told again when the position changes, when
    the request begins, and when it is preempted."""

    prompt_tokens: int
    cached_tokens: int
    queue_position: int = 0
    """1 is next in the queue; 0 has begun."""
    is_beyond_trained: bool = False
    """Prompt and answer may go beyond the positions that the model was trained for."""


class Tokens(msgspec.Struct, frozen=True):
    """What was generated; `index` is the index in the answer of the first token."""

    index: int
    tokens: tuple[Token, ...]
    sample: int = 0
    attention: tuple[Attention, ...] = ()
    """Of the row that produced each of them, if the prompt asked for it."""
    num_drafted: int = 0
    """Tokens that were drafted in the steps which gave these."""
    num_accepted: int = 0
    """Those of them that are among these."""
    step_ends: tuple[int, ...] = ()
    """How many of the tokens came with each step and those before it, but for the last one; empty for one step."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


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
    comparison: ComparisonRow | None = None
    """If the prompt asked for it."""
    found: ProbeResult | None = None
    """Of a probe."""


class ContextDropped(msgspec.Struct, frozen=True):
    """A context that is gone, because the ranks that are left cannot hold it."""

    context: str
    """Id of the context, without the `contexts/` prefix."""
    num_tokens: int
    reason: str


class Failed(msgspec.Struct, frozen=True):
    """A sample has ended with an error; the stream raises it when all samples have ended."""

    error: LongleafError
    sample: int = 0


class Sealed(msgspec.Struct, frozen=True):
    """The document of an ingest is read, and waits until it is kept."""


class Acknowledged(msgspec.Struct, frozen=True):
    """The document of an ingest is part of its context."""

    context: str


Event = Admitted | Progress | Recovering | Tokens | Ended
Outcome = tuple[int, Event | Failed | Sealed | Acknowledged | LongleafError]
"""Id of a request, and what becomes of it: last an error, the last Ended or Failed, or Acknowledged."""
