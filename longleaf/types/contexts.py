"""Contexts, what makes and changes them, and the tokens of a text."""

import re
from collections.abc import Sequence
from typing import Literal, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from longleaf.document_text import TextFile
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_seconds
from longleaf.types.generation import Recovering
from longleaf.types.scheduling_options import ClaimOptions, SchedulingOptions

IngestPhase = Literal["unspecified", "receiving", "tokenizing", "prefilling", "ready", "recovering"]
CONTEXT_ID = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
MAX_TIME = 253402300799
"""The last second of the year 9999."""
Precision = Literal["unspecified", "float32", "float64"]
"""Of phases: `unspecified` is what a later version of the service may say and this client does not know."""


ContextState = Literal["unspecified", "held", "parked", "restoring"]
"""Whether keys and values are there: all of them; some not, and nobody needs them; some not, and they are coming."""


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
    precision: Precision = "float32"
    """Numeric type of the phases; float32 are the model's own."""
    scaled_for: int = 0
    """Positions for which the scaling was chosen; 0: as the model begins."""
    phase_error: float = 0.0
    """Radians by which the phases of the tokens held are off, at most."""
    is_beyond_trained: bool = False
    """The context holds more tokens than the model was trained for."""


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
    """The keys and values are those that the model alone would have computed."""
    state: ContextState = "held"
    storage_bytes: int = 0
    """Bytes kept of it where contexts outlive the service."""
    used: float = 0.0
    """When it was asked, appended to or made last."""
    hits: int = 0
    """How often it was asked."""
    exactness_note: str = ""
    """Why the keys and values are not exact; empty where they are."""


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

    def check(self, now: float, parent: str) -> None:
        """Raises InvalidArgument for a time that has passed, or that a date cannot tell; `parent` carries the
        settings."""
        if self.expires is not UNSET and self.expires is not None and self.expires <= now:
            raise InvalidArgument(f"{parent}.expire_time", f"passed {human_seconds(now - self.expires)} ago")
        if self.ttl is not UNSET and now + self.ttl > MAX_TIME:
            raise InvalidArgument(f"{parent}.ttl", f"{human_seconds(self.ttl)} from now is after the year 9999")

    @property
    def ingest_expiry(self) -> float | None:
        """When a document ends on its way into a context with these settings, for that would be gone: seconds since
        the epoch. A ttl counts from when the context is there."""
        return None if self.is_pinned is True or self.expires is UNSET else self.expires


UNCHANGED = ContextSettings()


def expired() -> InvalidArgument:
    """What a document ends with whose context would be gone before it is there."""
    return InvalidArgument("config.expire_time", "has passed before the context was there")


class ContextOptions(TypedDict, total=False):
    """ContextSettings as a caller gives them."""

    display_name: str
    is_pinned: bool
    expires: float | None
    ttl: float
    capacity: int


class IngestOptions(ContextOptions, ClaimOptions, total=False):
    """All that a caller may say about an ingest besides its document."""

    append: bool
    """To an existing context."""
    upload_id: str
    """Names the ingest, so that it can be resumed."""
    system: str
    """A system's message that the chat template puts before the document."""
    timeout: float | None
    """Seconds for the whole call."""


class SkippedContext(msgspec.Struct, frozen=True):
    """A context that could not be brought back."""

    name: str
    reason: str


class RecomputeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the contexts that earlier checkpoints had read."""

    contexts: tuple[Context, ...]
    """Those that this one will read when they are asked."""
    left_out: tuple[SkippedContext, ...]


class ForkContext(msgspec.Struct, frozen=True):
    """A request for a context of the first `tokens` tokens of another one; None takes all."""

    source: str
    context: str
    tokens: int | None = None


class IngestHeader(SchedulingOptions, frozen=True):
    """The first message of an ingest. `total_bytes` is None when the size is not known beforehand; an `upload_id`
    makes the ingest resumable."""

    context: str
    append: bool = False
    total_bytes: int | None = None
    upload_id: str = ""
    settings: ContextSettings = UNCHANGED
    system: str = ""
    """A system's message that the chat template puts before the document."""
    files: tuple[TextFile, ...] = ()
    """Where files begin in the document's text."""


IngestPiece = IngestHeader | bytes | Sequence[int]


class IngestProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far an ingest is; `context` comes with the phase `ready`, `recovering` with that phase. `total` is 0 while it
    is not known.

    Of the first one, `received_bytes` and `received_tokens` (for token ids) tell where to send from."""

    phase: IngestPhase
    received_bytes: int = 0
    received_tokens: int = 0
    processed: int = 0
    total: int = 0
    tokens_per_second: float = 0.0
    context: Context | None = None
    recovering: Recovering | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """The tokens of a text. `spans`, if asked for: each token's first character, and the one after its last."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] | None = None


TextUnit = Literal["tokens", "bytes"]


class GetContextText(msgspec.Struct, frozen=True):
    """Asks for the text of a context's tokens [start, end), or of its bytes."""

    context: str
    unit: TextUnit
    start: int
    end: int


class ContextText(msgspec.Struct, frozen=True, kw_only=True):
    """Some text of a context, in whole characters, and where it is. Bytes are those of all texts that the context was
    ingested of, one after the other; None where its tokens were given as ids, and nothing is known of a text."""

    text: str
    token_start: int
    token_end: int
    byte_start: int | None = None
    byte_end: int | None = None
    file: str = ""
    """The file in which the first byte lies, if it is known."""
    line: int | None = None
    """The line of the first byte within that file, from 1 on; without one, within its document."""
