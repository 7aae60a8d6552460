"""What goes into the engine and what comes out, in token ids; text is the business of `coordinator.calls`."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from longleaf.channel.step import Comparison
from longleaf.document_text import DocumentText
from longleaf.errors import LongleafError
from longleaf.messages import UNCHANGED, Claimed, ContextSettings, Progress, Recovering
from longleaf.sampling import Sampling, Token

EndReason = Literal["end_token", "length", "stop_token"]


class Claim(Claimed, frozen=True, kw_only=True):
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

    def outranks(self, other: "Claim") -> bool:
        """By its priority, which counts inside of a tenant alone."""
        return self.tenant == other.tenant and self.priority > other.priority


NO_CLAIM = Claim()


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A generation to run: `token_ids` after the context (or alone)."""

    context: str | None
    """Id of the context to ask, without the `contexts/` prefix."""
    token_ids: Sequence[int]
    sampling: Sampling
    end_tokens: frozenset[int] = frozenset()
    """Ids that end the generation unless sampling.ignore_end_token; the end token itself is reported."""
    num_samples: int = 1
    """Answers, each with its own tokens; number i is drawn with the seed i above that of sampling."""
    claim: Claim = NO_CLAIM
    is_compared: bool = False
    """Compare its logits with those of plain attention. Such a prompt reads no keys of others, and leaves none."""
    generated: Mapping[int, Sequence[int]] | None = None
    """Where answers go on that were told in part: their ids so far, by sample. Samples that are not in it have ended.
    None: all begin."""

    @property
    def num_open(self) -> int:
        """Answers that are to come, or to go on."""
        return self.num_samples if self.generated is None else len(self.generated)

    @property
    def num_left(self) -> int:
        """Tokens that each of these may still have, at most."""
        told = () if self.generated is None else self.generated.values()
        return self.sampling.max_tokens - min(map(len, told), default=0)

    def end_reason(self, token_id: int, num_generated: int) -> EndReason | None:
        """Why `token_id` ends an answer that has `num_generated` tokens with it; None when it does not."""
        if token_id in self.end_tokens and not self.sampling.ignore_end_token:
            return "end_token"
        if token_id in self.sampling.stop_tokens:
            return "stop_token"
        return "length" if num_generated >= self.sampling.max_tokens else None


class Document(msgspec.Struct, frozen=True, kw_only=True):
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
    claim: Claim = NO_CLAIM


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
    comparison: Comparison | None = None
    """If the prompt asked for it."""


class GivenUp(msgspec.Struct, frozen=True):
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
