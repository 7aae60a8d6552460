"""Position limits and rope choices. Both are fixed for each context when it is created. Pure."""

from typing import NamedTuple

from msgspec.structs import replace

from longleaf.errors import InvalidArgument
from longleaf.positions import FLOAT32_POSITIONS, OWN_ROPE, Rope, Rotary
from longleaf.types import ModelInfo, PositionInfo

UNLIMITED = 1 << 40
FLOAT64_SHOWN = 1 << 24
"""Number of positions for which the phase error of float64 is reported: past it float32 cannot represent each position.
"""
CAPACITY_FIELD = "config.capacity_token_count"
HEADROOM = 8
"""A context without a declared capacity keeps at least 1/HEADROOM of it free for questions and appends."""


class RopeSwitch(NamedTuple):
    """The rotation of a generation: `near` for up to `border` positions, then `far` for all of it, which recomputes all
    keys."""

    near: Rope
    far: Rope
    border: int = UNLIMITED

    def at(self, num_positions: int) -> Rope:
        """The rope for a given number of positions."""
        return self.near if num_positions <= self.border else self.far


class Positions:
    """The positions that the model supports. `max_positions` applies where the ranks know of no trained length."""

    def __init__(self, rotary: Rotary, max_positions: int, *, allow_long: bool = False) -> None:
        self._rotary = rotary
        self.is_long_allowed = allow_long
        self.trained = rotary.trained or max_positions
        """Positions that the model was trained for."""
        self.limit = min(rotary.max_positions or UNLIMITED, UNLIMITED if allow_long else self.trained)
        """The maximum number of positions of any context or generation."""

    def from_report(self, rotary: Rotary) -> "Positions":
        """The positions with the rotation that the ranks have reported."""
        return Positions(rotary, self.trained, allow_long=self.is_long_allowed)

    @property
    def limit_name(self) -> str:
        """Explanation of the limit and its remedy, for use after a number of positions."""
        rotary = self._rotary
        if rotary.max_positions and (self.is_long_allowed or rotary.max_positions < self.trained):
            return f"because {rotary.reason}"
        if self.trained >= UNLIMITED:
            return "the limit of every model"
        return "the length that it was trained for (only serve --allow-long goes beyond it)"

    def rope(self, capacity: int) -> Rope:
        """The rope for contexts of up to `capacity` positions."""
        rotary = self._rotary
        is_scaled = 0 < rotary.scaled_from < capacity
        scaled_for = capacity if rotary.is_graded else rotary.scaled_from + 1
        is_double = bool(rotary.kind) and capacity > FLOAT32_POSITIONS
        return Rope(scaled_for=scaled_for if is_scaled else 0, is_double=is_double)

    def ropes(self, capacity: int) -> RopeSwitch:
        """The ropes for a generation of up to `capacity` positions, prompt and answer. Where the model has two
        scalings, the length so far chooses one, as in transformers. Where each length has another scaling (dynamic),
        the scaling for `capacity` is used from the first token on."""
        far, rotary = self.rope(capacity), self._rotary
        if not far.scaled_for or rotary.is_graded:
            return RopeSwitch(far, far)
        return RopeSwitch(replace(far, scaled_for=0), far, rotary.scaled_from)

    def question_ropes(self, rope: Rope, capacity: int, num_positions: int) -> RopeSwitch:
        """The ropes for a question about a context of `rope` and `capacity`, and for its answer, up to `num_positions`
        in all. Where the model has two scalings, they switch as for any generation, except that a context whose
        capacity is below the limit of the shorter scaling keeps its rope."""
        border = self._rotary.scaled_from
        if not border or self._rotary.is_graded or capacity < border:
            return RopeSwitch(rope, rope)
        far = rope if rope.scaled_for else self.rope(max(num_positions, border + 1))
        return RopeSwitch(replace(rope, scaled_for=0), far, border)

    def question_capacity(self, rope: Rope, capacity: int, num_tokens: int) -> int:
        """The maximum number of positions for an answer of unspecified length, after `num_tokens` of a context of
        `rope` and `capacity` and a question."""
        outgrows = self.question_ropes(rope, capacity, num_tokens).far != rope
        return max(capacity, self.capacity(num_tokens, None)) if outgrows else capacity

    def scaling_note(self, ropes: RopeSwitch, num_prompt: int) -> str:
        """Explains why an answer to `num_prompt` tokens with these ropes differs from that of transformers, which
        scales positions for the length so far, not for the maximum length. Empty where it does not differ."""
        border, rope = self._rotary.scaled_from, ropes.at(num_prompt)
        if rope.scaled_for and self._rotary.is_graded:
            return f"positions are scaled for {rope.scaled_for:,} from the first token, not for the current length"
        if rope.scaled_for and num_prompt <= border:
            return f"positions are scaled for more than {border:,} from the first token, before that length is reached"
        if rope != ropes.far and self._rotary.has_mixed_keys:
            return (
                f"past {border:,} positions the answer is that of transformers without a cache (use_cache=False): with "
                "one, `generate` keeps the keys of the other scaling for this class of models"
            )
        return ""

    def capacity(self, num_tokens: int, declared: int | None) -> int:
        """The capacity of a new context of `num_tokens`. Raises InvalidArgument for an invalid declared capacity.

        The default is the smallest capacity that leaves some headroom and does not change how the document is rotated.
        """
        if declared is None:
            return min(self.limit, self._default(num_tokens))
        self.check_capacity(declared)
        if declared < num_tokens:
            raise InvalidArgument(
                CAPACITY_FIELD, f"{declared:,} is less than the {num_tokens:,} tokens of the document"
            )
        return declared

    def _default(self, num_tokens: int) -> int:
        rotary = self._rotary
        bounds = [rotary.scaled_from] if rotary.is_graded else [rotary.scaled_from, FLOAT32_POSITIONS]
        for bound in sorted(bounds):
            if num_tokens <= bound - bound // HEADROOM:
                return bound
        needed = num_tokens * HEADROOM // (HEADROOM - 1)
        return 1 << needed.bit_length() if rotary.is_graded else UNLIMITED

    def check_capacity(self, declared: int) -> None:
        """Raises InvalidArgument for a capacity above the limit."""
        if declared > self.limit:
            message = f"{declared:,} exceeds {self.limit:,} positions, {self.limit_name}"
            raise InvalidArgument(CAPACITY_FIELD, message)

    def error(self, rope: Rope, num_positions: int) -> float:
        """Maximum phase error, in radians."""
        return num_positions * (self._rotary.float64_error if rope.is_double else self._rotary.float32_error)

    def describe_model(self, model: ModelInfo) -> ModelInfo:
        """`model` with its position limits and phase errors."""
        own = min(FLOAT32_POSITIONS, self.limit)
        return replace(
            model,
            max_context_tokens=self.trained,
            rope=self._rotary.kind,
            is_long_allowed=self.is_long_allowed,
            float32_phase_error=self.error(OWN_ROPE, own),
            float64_phase_error=self.error(Rope(is_double=True), FLOAT64_SHOWN),
        )

    def describe(self, rope: Rope, capacity: int, num_tokens: int) -> PositionInfo:
        """The position properties of a context, as reported to clients."""
        return PositionInfo(
            capacity=capacity,
            rope=self._rotary.kind,
            precision="float64" if rope.is_double else "float32",
            scaled_for=rope.scaled_for,
            phase_error=self.error(rope, num_tokens),
            is_beyond_trained=num_tokens > self.trained,
        )
