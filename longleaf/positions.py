"""Positions as numbers: how they are rotated, and which earlier ones a query sees."""

import math
from typing import NamedTuple

import msgspec

from longleaf.runs import ceil_div

FLOAT32_POSITIONS = 1 << 17
"""Contexts of up to so many positions have the model's own phases, in float32; longer ones have them in float64."""


class Rope(msgspec.Struct, frozen=True, array_like=True):
    """How positions are rotated: fixed for a context when it is created, because its keys carry it."""

    scaled_for: int = 0
    """Number of positions that the scaling was chosen for, where it depends on that; 0: as the model begins."""
    is_double: bool = False
    """Phases are float64, not the model's own."""


OWN_ROPE = Rope()
"""As the model itself rotates what is short."""


class Rotary(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows of its model's positions. Errors are radians per position, at most."""

    kind: str = ""
    """As transformers names them, such as `yarn`, joined by + where layers differ; empty without rotary positions."""
    trained: int = 0
    """Positions that the model was trained for; 0 when its config does not tell."""
    max_positions: int = 0
    """Past these the model has none, or none that are right, for `reason`; 0: no such limit."""
    reason: str = ""
    scaled_from: int = 0
    """More positions than these have another scaling; 0: the scaling does not depend on their number."""
    is_graded: bool = False
    """Each number of positions past `scaled_from` has a scaling of its own; otherwise all have the same."""
    has_mixed_keys: bool = False
    """transformers' `generate` goes on with keys of both scalings in its cache when a text becomes longer than
    `scaled_from`; for some classes it computes all keys anew instead."""
    float32_error: float = 0.0
    """Error of the model's own phases against float64."""
    float64_error: float = 0.0


class AttentionSpan(NamedTuple):
    """How far back the queries of a layer see: to the beginning, unless a field says otherwise."""

    window: int | None = None
    """A query sees only the last so many keys, itself included."""
    section: int | None = None
    """Positions are cut into sections of this size, and a query sees only keys of its own section: the chunked
    attention of Llama 4."""

    @property
    def is_full(self) -> bool:
        return self == AttentionSpan()

    @property
    def span(self) -> int:
        """Keys that a query sees at most, itself included; 0: no limit."""
        return self.window or self.section or 0

    @property
    def stride(self) -> int:
        """At multiples of it a query sees itself alone, as where sections begin; 0: at the very first position only."""
        return 1 if self.window == 1 else self.section or 0

    def first(self, position: int) -> int:
        """The first position that a query at `position` sees; never falls when the position grows."""
        if self.section is not None:
            return position - position % self.section
        return 0 if self.window is None else max(0, position - self.window + 1)


class WindowSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is held of layers that see only the last keys, when each rank holds these keys itself.

    They lie in a pool of their own, in the same blocks on every rank. A segment has them before its end alone, so only
    from there can it be continued.
    """

    reaches: tuple[AttentionSpan, ...]
    """How far back these layers see, each kind of them; all limited."""
    num_blocks: int = 0
    """Blocks of the pool."""
    bytes_per_token: int = 0
    """Bytes of keys and values per token on each rank, over these layers."""

    def first(self, position: int) -> int:
        """The first position that a query at `position` sees in any of these layers; never falls when the position
        grows."""
        return min([reach.first(position) for reach in self.reaches])

    @property
    def stride(self) -> int:
        """At multiples of it a query sees itself alone in all of these layers; 0: at the very first position only."""
        return math.lcm(*(reach.stride for reach in self.reaches))

    @property
    def span(self) -> int:
        """Keys that a query sees at most, itself included."""
        return max(reach.span for reach in self.reaches)

    def seen_blocks(self, block_size: int) -> int:
        """Blocks of all that a token sees, if it was read at once; it may begin within a block."""
        return ceil_div(self.span, block_size) + 1

    def chunk_blocks(self, block_size: int) -> int:
        """Blocks that a segment takes at most while it grows in chunks.

        It has up to two runs, what the chunk sees and what is seen after it: fewer than `span` tokens each, of which
        the first run may begin within a block.
        """
        return 2 * ceil_div(self.span, block_size) + 1

    def row_blocks(self, num_at_once: int, block_size: int) -> int:
        """Blocks that a segment takes at most while it grows in rows of up to `num_at_once` tokens.

        It has one run: the row, and fewer than `span` tokens before it, which may begin within a block.
        """
        return ceil_div(self.span + num_at_once, block_size) + 1

    def least_blocks(self, num_at_once: int, block_size: int) -> int:
        """Blocks with which any one context and one generation over it fit: what is seen after the context, then what
        the prompt's chunks take, then its answer, in rows of up to `num_at_once` tokens, counted in whole blocks."""
        in_rows = self.row_blocks(ceil_div(num_at_once, block_size) * block_size, block_size)
        return self.seen_blocks(block_size) + self.chunk_blocks(block_size) + in_rows


EVERY_RANK = -1
"""Instead of the rank of a run that lies in the same blocks on every rank."""

UNLIMITED_TOKENS = 1 << 31
"""Tokens that a rank holds at most where none of their keys takes room for ever, and any number would only be in the
way."""
