"""Where in a context an answer comes from: what is asked, and what is told."""

from typing import Literal

import msgspec

Ranking = Literal["raw", "contrast"]
TokenRange = tuple[int, int]
"""Tokens [start, end) of a context, counted from 0."""
MIN_SPAN_TOKENS = 32
"""Of a span, the fewest: kernels tell their keys in blocks of so many."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Asks where an answer comes from: how much of the attention of the rows that produced its tokens fell on which
    spans of the context."""

    span_tokens: int | None = None
    """Tokens of a span: a power of two, at least 32, that divides the service's tokens per block; None: 64."""
    num_spans: int = 8
    """Sources to tell, 1 to 64."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers that count, each of which must see all keys; empty: all that do."""
    per_token: bool = False
    """Each Delta tells where its tokens come from, too, ranked `raw`."""
    ranking: Ranking = "raw"
    """`raw`: by their share of attention; `contrast`: less the share that tokens before the question gave them."""
    confirm: bool = False
    """After the answer its first 256 tokens are read again, with each source hidden, one after the other."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A span of the context. Shares are of attention, from 0 to 1."""

    token_start: int
    """Position of its first token in the context."""
    token_end: int
    """The position after its last token."""
    share: float
    """In the mean over tokens, layers and heads."""
    largest_share: float
    """The largest that one head gave it at one token."""
    largest_layer: int
    """The layer of that head."""
    largest_head: int
    """Its number in the layer."""
    contrast: float | None = None
    """`share` less that from tokens before the question; None where that was not needed."""
    drop: float | None = None
    """How much less likely the answer is while nothing reads this span, in nats (natural logarithms); None unless that
    was to be confirmed."""
    bytes: tuple[int, int] | None = None
    """Its bytes [start, end) of all texts that the context was ingested of, one after the other; None for tokens
    without text."""
    file: str = ""
    """The file in which the first byte lies, if it is known."""


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Where tokens of an answer come from. The four shares are 1 together."""

    sources: tuple[Source, ...] = ()
    """The spans ranked first, the first one first."""
    context_share: float = 0.0
    """Of all spans of the context."""
    prompt_share: float = 0.0
    """Of the prompt behind the context."""
    answer_share: float = 0.0
    """Of the answer itself."""
    sink_share: float = 0.0
    """Of the sinks that some models have in the place of a key."""
    num_tokens: int = 0
    """Tokens that were counted."""
