"""How long a text may be before it is turned into ids."""

from typing import Protocol

from longleaf.errors import InvalidArgument


class Capacity(Protocol):
    """What an engine can hold."""

    @property
    def max_positions(self) -> int:
        """Tokens of context that may be reached with the model."""
        ...

    @property
    def limit_name(self) -> str:
        """What sets `max_positions`."""
        ...

    @property
    def total_tokens(self) -> int:
        """Tokens that the pools of all ranks hold."""
        ...

    def num_tokens(self, context_id: str) -> int:
        """Tokens of a context. Raises NotFound."""
        ...


class SizeLimit:
    """The most tokens and bytes that can possibly fit after `held` tokens.

    What is over is refused before it is read, let alone tokenized: that takes far more memory than the text.
    """

    def __init__(self, capacity: Capacity, max_bytes_per_token: int | None, held: int = 0) -> None:
        positions, pool = capacity.max_positions, capacity.total_tokens
        self.num_tokens = max(0, min(positions, pool) - held)
        self.name = f"{min(positions, pool):,} tokens of "
        self.name += f"the model's context, {capacity.limit_name}" if positions <= pool else "the pools of all ranks"
        if held:
            self.name += f"; {held:,} of them are taken"
        self.num_bytes = None if max_bytes_per_token is None else self.num_tokens * max_bytes_per_token

    def check(self, field: str, num_bytes: int) -> None:
        """Raises InvalidArgument naming `field` when so many bytes cannot fit."""
        if self.num_bytes is not None and num_bytes > self.num_bytes:
            raise InvalidArgument(
                field, f"{num_bytes:,} bytes cannot fit: at most {self.num_bytes:,} bytes make the {self.name}"
            )

    def check_tokens(self, field: str, count: int) -> None:
        """Raises InvalidArgument naming `field` when so many tokens, or more to come, cannot fit."""
        if count > self.num_tokens:
            raise InvalidArgument(field, f"{count:,} tokens or more cannot fit in the {self.name}")
