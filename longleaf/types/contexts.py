"""Contexts, requests that create and change them, and tokenized text."""

import re
from collections.abc import Sequence
from typing import Literal, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from longleaf.document_text import TextFile
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_seconds
from longleaf.types.generation import Recovering
from longleaf.types.scheduling_options import SchedulingKwargs, SchedulingOptions

IngestPhase = Literal["unspecified", "receiving", "tokenizing", "prefilling", "ready", "recovering"]
CONTEXT_ID = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
MAX_TIME = 253402300799
"""The last second of the year 9999."""
Precision = Literal["unspecified", "float32", "float64"]
"""Precision of phases. `unspecified` is a value that this client version does not know."""


ContextState = Literal["unspecified", "resident", "evicted", "restoring"]
"""Residency of keys and values: complete (`resident`), evicted and not needed (`evicted`), or being restored
(`restoring`)."""


class RankShare(msgspec.Struct, frozen=True):
    """The part of a context on one rank."""

    rank: int
    tokens: int
    kv_bytes: int


class PositionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Position encoding of a context; fixed at creation, because the stored keys depend on it."""

    capacity: int = 0
    """Maximum number of tokens of the context, the prompt and the answer together."""
    rope: str = ""
    """Type of the rotary embedding, as transformers names it, such as `yarn`; empty if the model has none."""
    precision: Precision = "float32"
    """Numeric type of the phases; float32 is that of the model."""
    scaled_for: int = 0
    """Number of positions for which the scaling was chosen; 0: the model's default."""
    phase_error: float = 0.0
    """Upper bound of the phase error of the stored tokens, in radians."""
    is_beyond_trained: bool = False
    """Whether the context has more tokens than the model was trained for."""


class Context(msgspec.Struct, frozen=True):
    """A context. `created`, `updated` and `expires` (None: never) are seconds since the Unix epoch."""

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
    """Whether the keys and values equal those that the model would have computed without sharding."""
    state: ContextState = "resident"
    storage_bytes: int = 0
    """Bytes on persistent storage."""
    used: float = 0.0
    """Time of the last request, append or creation."""
    hits: int = 0
    """Number of requests."""
    exactness_note: str = ""
    """Reason why the keys and values are not exact; empty if they are."""
    dequantization: str = ""
    """The stored layout and the computed type of quantized weights; see Finished."""
    recomputed_tokens: int = 0
    """Only in the result of a fork: tokens that were computed again, see ForkContext."""


class ContextSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Client-defined settings of a context. Unset ones are unchanged; the defaults are no name, no expiry, no pin."""

    display_name: str | UnsetType = UNSET
    is_pinned: bool | UnsetType = UNSET
    expires: float | UnsetType | None = UNSET
    """Seconds since the Unix epoch; None means never."""
    ttl: float | UnsetType = UNSET
    """Seconds until it expires, from now or from the acknowledgement of its ingest; an alternative to `expires`."""
    capacity: int | UnsetType = UNSET
    """Maximum number of tokens of the context, the prompt and the answer together; settable at creation only."""

    def check(self, now: float, parent: str) -> None:
        """Raises InvalidArgument for a time in the past, or one that a date cannot represent; `parent` is the field
        that contains the settings."""
        if self.expires is not UNSET and self.expires is not None and self.expires <= now:
            raise InvalidArgument(f"{parent}.expire_time", f"passed {human_seconds(now - self.expires)} ago")
        if self.ttl is not UNSET and now + self.ttl > MAX_TIME:
            raise InvalidArgument(f"{parent}.ttl", f"{human_seconds(self.ttl)} from now is after the year 9999")

    @property
    def ingest_expiry(self) -> float | None:
        """Time at which an ingest with these settings fails because its context would have expired, in seconds since
        the Unix epoch. A ttl starts with the acknowledgement and does not count."""
        return None if self.is_pinned is True or self.expires is UNSET else self.expires


UNCHANGED = ContextSettings()


def expired() -> InvalidArgument:
    """The error of an ingest whose context would expire before it exists."""
    return InvalidArgument("config.expire_time", "passed before the context was created")


class ContextOptions(TypedDict, total=False):
    """ContextSettings as keyword arguments."""

    display_name: str
    is_pinned: bool
    expires: float | None
    ttl: float
    capacity: int


class IngestOptions(ContextOptions, SchedulingKwargs, total=False):
    """Keyword arguments of an ingest, except the document."""

    append: bool
    """Append to an existing context."""
    upload_id: str
    """Identifies the ingest, so that it can be resumed."""
    system: str
    """A system message that the chat template puts before the document."""
    timeout: float | None
    """Seconds for the whole call."""


class SkippedContext(msgspec.Struct, frozen=True):
    """A context that could not be restored."""

    name: str
    reason: str


class RecomputeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result for the contexts that earlier checkpoints ingested."""

    contexts: tuple[Context, ...]
    """Contexts that the current checkpoint will recompute on their first request."""
    skipped: tuple[SkippedContext, ...]


class ForkContext(msgspec.Struct, frozen=True):
    """A request for a context of the first `tokens` tokens of another one; None copies all. If the other one cannot be
    continued there, `recompute` computes tokens again from the nearest position before."""

    source: str
    context: str
    tokens: int | None = None
    recompute: bool = False


class IngestHeader(SchedulingOptions, frozen=True):
    """The first message of an ingest. `total_bytes` is None if the size is unknown in advance; an `upload_id` makes the
    ingest resumable."""

    context: str
    append: bool = False
    total_bytes: int | None = None
    upload_id: str = ""
    settings: ContextSettings = UNCHANGED
    system: str = ""
    """A system message that the chat template puts before the document."""
    files: tuple[TextFile, ...] = ()
    """Start offsets of the files in the document's text."""


IngestPiece = IngestHeader | bytes | Sequence[int]


class IngestProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of an ingest; `context` is set in the phase `ready`, `recovering` in the phase of that name. `total` is
    0 while unknown.

    In the first message, `received_bytes` and `received_tokens` (for token ids) are the offset to send from.
    """

    phase: IngestPhase
    received_bytes: int = 0
    received_tokens: int = 0
    processed: int = 0
    total: int = 0
    tokens_per_second: float = 0.0
    context: Context | None = None
    recovering: Recovering | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """The tokens of a text. `spans`, if requested, contains each token's character range [start, end)."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] | None = None


TextUnit = Literal["tokens", "bytes"]


class GetContextText(msgspec.Struct, frozen=True):
    """A request for the text of a context's tokens [start, end), or of its bytes."""

    context: str
    unit: TextUnit
    start: int
    end: int


class ContextText(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a context's text, in whole characters, and its position. Byte offsets count in the concatenated
    ingested texts; None if the context was ingested as token ids, which have no known text."""

    text: str
    token_start: int
    token_end: int
    byte_start: int | None = None
    byte_end: int | None = None
    file: str = ""
    """The file that contains the first byte, if known."""
    line: int | None = None
    """The line of the first byte within that file, counted from 1; without a file, within its document."""
    last_file: str = ""
    """The file that contains the last byte, if that is another one."""
