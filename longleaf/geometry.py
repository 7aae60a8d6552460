"""Positions as numbers: how they are rotated, and which earlier ones a query sees."""

import math

import msgspec

FLOAT32_POSITIONS = 1 << 17
"""Contexts of up to so many positions have the model's own phases, in float32; longer ones have them in float64."""


class Rope(msgspec.Struct, frozen=True):
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
    float32_error: float = 0.0
    """Of the model's own phases against float64."""
    float64_error: float = 0.0


class Windows(msgspec.Struct, frozen=True, kw_only=True):
    """What is held of layers that see only the last keys, when each rank holds these keys itself.

    They lie in a pool of their own, in the same blocks on every rank. A segment has them before its end alone, so only
    from there can it be continued.
    """

    windows: tuple[int, ...] = ()
    """Keys that a query sees, itself included, for each kind of layer that has such a window."""
    sections: tuple[int, ...] = ()
    """Size of the sections that positions are cut into, for each kind of layer that sees its own section alone."""
    num_blocks: int = 0
    """Blocks of the pool."""
    bytes_per_token: int = 0
    """Bytes of keys and values per token on each rank, over these layers."""

    def first(self, position: int) -> int:
        """The first position that a query at `position` sees in any of these layers; never falls when the position
        grows."""
        starts = [position - window + 1 for window in self.windows]
        starts += [position - position % section for section in self.sections]
        return max(0, min(starts))

    @property
    def stride(self) -> int:
        """At multiples of it a query sees itself alone, as where sections begin; 0: nowhere."""
        return 0 if any(window > 1 for window in self.windows) else math.lcm(*self.sections)

    @property
    def span(self) -> int:
        """Keys that a query sees at most, itself included."""
        return max(*self.windows, *self.sections, 0)


EVERY_RANK = -1
"""Instead of the rank of a run that lies in the same blocks on every rank."""

UNLIMITED_TOKENS = 1 << 31
"""Tokens that a rank holds at most where none of their keys takes room for ever, and any number would only be in the
way."""
