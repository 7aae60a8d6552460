"""Positions: rotary embedding parameters, and the range of keys that a query attends to."""

import math
from typing import NamedTuple

import msgspec

from longleaf.runs import ceil_div

FLOAT32_POSITIONS = 1 << 17
"""Contexts with a capacity up to this use the model's own float32 phases; longer ones use float64."""


class Rope(msgspec.Struct, frozen=True, array_like=True):
    """Rotary embedding parameters of a context; fixed at creation, because the stored keys depend on them."""

    scaled_for: int = 0
    """Number of positions for which the scaling was chosen, if the scaling depends on it; 0: the model's default."""
    is_double: bool = False
    """Phases are float64 instead of the model's type."""


OWN_ROPE = Rope()
"""The model's own rotation of short sequences."""


class Rotary(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the model's positions. Errors are upper bounds in radians per position."""

    kind: str = ""
    """Types as transformers names them, such as `yarn`, joined by + if layers differ; empty without rotary embedding.
    """
    trained: int = 0
    """Number of positions that the model was trained for; 0 if the config does not define it."""
    max_positions: int = 0
    """The number of positions beyond which the model is undefined or wrong, for `reason`; 0: no limit."""
    reason: str = ""
    scaled_from: int = 0
    """Number of positions beyond which the scaling differs; 0: the scaling is constant."""
    is_graded: bool = False
    """Every number of positions beyond `scaled_from` has its own scaling; otherwise all have the same."""
    has_mixed_keys: bool = False
    """transformers' `generate` mixes keys of both scalings in its cache when a sequence grows beyond `scaled_from`; for
    some classes it recomputes all keys instead."""
    float32_error: float = 0.0
    """Error of the model's own phases relative to float64."""
    float64_error: float = 0.0


class AttentionSpan(NamedTuple):
    """The range of keys that queries of a layer attend to: all earlier ones, unless a field limits it."""

    window: int | None = None
    """Size of the sliding window, including the query itself."""
    section: int | None = None
    """Positions are divided into chunks of this size, and a query attends only to keys of its own chunk: the chunked
    attention of Llama 4."""

    @property
    def is_full(self) -> bool:
        return self == AttentionSpan()

    @property
    def span(self) -> int:
        """Maximum number of keys per query, including itself; 0: no limit."""
        return self.window or self.section or 0

    @property
    def stride(self) -> int:
        """At multiples of this position a query attends only to itself, as at the start of a chunk; 0: only at position
        0."""
        return 1 if self.window == 1 else self.section or 0

    def first(self, position: int) -> int:
        """The first position that a query at `position` attends to; non-decreasing in the position."""
        if self.section is not None:
            return position - position % self.section
        return 0 if self.window is None else max(0, position - self.window + 1)


class WindowSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Storage of sliding-window keys that are replicated on every rank, or of recurrent states.

    They have a separate pool, with the same blocks on every rank. A segment keeps only the keys before its end, so it
    can be continued only there.

    A recurrent state takes the place of the key of one position: the state after it. The next token needs the state
    after the position before it, as with a window of two, and no other.
    """

    reaches: tuple[AttentionSpan, ...]
    """The distinct key ranges of these layers, all of them limited."""
    num_blocks: int = 0
    """Blocks of the pool."""
    bytes_per_token: int = 0
    """Bytes of keys and values per token, or of a state, on each rank, over these layers."""
    is_state: bool = False
    """The pool holds recurrent states, each in a block of one position. Rows and chunks store only the last one."""

    @property
    def noun(self) -> str:
        """The content of the pool, in messages."""
        return "state" if self.is_state else "window"

    def block_size(self, pool_block_size: int) -> int:
        """Positions per block, if the blocks of all other keys have `pool_block_size`."""
        return 1 if self.is_state else pool_block_size

    def first(self, position: int) -> int:
        """The first position that a query at `position` attends to in any of these layers; non-decreasing in the
        position."""
        return min([reach.first(position) for reach in self.reaches])

    @property
    def stride(self) -> int:
        """At multiples of this position a query attends only to itself in all of these layers; 0: only at position
        0."""
        return math.lcm(*(reach.stride for reach in self.reaches))

    @property
    def span(self) -> int:
        """Maximum number of keys per query, including itself."""
        return max(reach.span for reach in self.reaches)

    def seen_blocks(self, block_size: int) -> int:
        """Blocks of the keys that one token attends to, if they were computed in one chunk; they may start within a
        block. The state before one token."""
        if self.is_state:
            return 1
        return ceil_div(self.span, block_size) + 1

    def chunk_blocks(self, block_size: int) -> int:
        """Maximum blocks of a segment while it grows in chunks.

        It has up to two runs: keys for the chunk, and keys for later tokens. Each has fewer than `span` tokens in
        addition to the chunk, and the first may start within a block. States: the one before the chunk, and the last.
        """
        if self.is_state:
            return 2
        return 2 * ceil_div(self.span, block_size) + 1

    def row_blocks(self, num_at_once: int, block_size: int) -> int:
        """Maximum blocks of a segment while it grows in rows of up to `num_at_once` tokens.

        It has one run: the row, and fewer than `span` tokens before it, which may start within a block. States: the
        one before the row, and the last.
        """
        if self.is_state:
            return 2
        return ceil_div(self.span + num_at_once, block_size) + 1

    def least_blocks(self, num_at_once: int, block_size: int) -> int:
        """Blocks sufficient for any single context and one generation on it: the keys at the end of the context, the
        chunks of the prompt, and the answer in rows of up to `num_at_once` tokens, in whole blocks."""
        in_rows = self.row_blocks(ceil_div(num_at_once, block_size) * block_size, block_size)
        return self.seen_blocks(block_size) + self.chunk_blocks(block_size) + in_rows


EVERY_RANK = -1
"""Used as the rank of a run with the same blocks on every rank."""

STATE_SPAN = AttentionSpan(window=2)
"""The reach of a token to the state before it: see `WindowSpec`."""

UNLIMITED_TOKENS = 1 << 31
"""Token capacity of a rank if no layer keeps all tokens, so that the capacity is effectively unlimited."""
