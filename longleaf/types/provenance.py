"""Source attribution: which parts of a context an answer attends to."""

from typing import Literal

import msgspec

Ranking = Literal["contrast", "raw"]
TokenRange = tuple[int, int]
"""Tokens [start, end) of a context, counted from 0."""
MIN_SPAN_TOKENS = 32
"""Smallest span: the kernels attribute attention to blocks of this many keys."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """A request for source attribution: how much attention the rows that produced the answer's tokens paid to each span
    of the context."""

    span_tokens: int | None = None
    """Tokens per span: a power of two, at least 32, that divides the service's tokens per block; None: 64."""
    num_spans: int = 8
    """Number of sources to return, 1 to 64."""
    layers: tuple[int, ...] = ()
    """Layers to include, which must be full-attention layers; empty: all of them."""
    per_token: bool = False
    """Each Delta also has the attribution of its tokens, ranked `raw`."""
    ranking: Ranking = "contrast"
    """`contrast`: by the share of attention minus the baseline, the share that the same span gets for a neutral
    question; `raw`: only by the share. Spans without a positive value are not returned."""
    confirm: bool = False
    """After the answer, its first 256 tokens are evaluated again with each source hidden in turn."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A span of the context. Shares are of attention, from 0 to 1."""

    token_start: int
    """Position of its first token in the context."""
    token_end: int
    """The position after its last token."""
    share: float
    """Mean over tokens, layers and heads."""
    largest_share: float
    """Largest share of a single head at a single token."""
    largest_layer: int
    """Layer of that head."""
    largest_head: int
    """Number of that head in its layer."""
    contrast: float | None = None
    """`share` minus the share that a neutral question gives to the span; None for the ranking `raw`."""
    drop: float | None = None
    """Decrease of the answer's log likelihood while this span is hidden, in nats (natural logarithm); None unless
    `confirm` was requested."""
    bytes: tuple[int, int] | None = None
    """Byte range [start, end) in the concatenated ingested texts; None for tokens without text."""
    file: str = ""
    """The file that contains the first byte, if known."""
    last_file: str = ""
    """The file that contains the last byte, if that is another one."""


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Attribution of the tokens of an answer. The five shares add up to 1."""

    sources: tuple[Source, ...] = ()
    """Spans in order of rank, the highest first."""
    context_share: float = 0.0
    """Share of all spans of the context."""
    prompt_share: float = 0.0
    """Share of the prompt after the context."""
    answer_share: float = 0.0
    """Share of the answer itself."""
    sink_share: float = 0.0
    """Share of learned sinks, for models that have them."""
    num_tokens: int = 0
    """Number of attributed tokens."""
    opening_share: float = 0.0
    """Share of the context's first tokens, which are never a source: the chat template before the first document, and
    at least 4 tokens. Many models give them the attention that they have no use for (attention sinks)."""
