"""Size limits of texts before tokenization."""

from typing import TYPE_CHECKING

from longleaf.errors import InvalidArgument

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine


class SizeLimit:
    """The most tokens and bytes that can fit after `num_buffered` tokens.

    Larger input is rejected before it is read or tokenized, because token ids take far more memory than the text.
    """

    def __init__(self, engine: "Engine", max_bytes_per_token: int | None, num_buffered: int = 0) -> None:
        positions, pool = engine.max_positions, engine.total_tokens
        self.num_tokens = max(0, min(positions, pool) - num_buffered)
        self.name = f"{min(positions, pool):,} tokens of "
        self.name += f"the model's context, {engine.limit_name}" if positions <= pool else "the pools of all ranks"
        if num_buffered:
            self.name += f"; {num_buffered:,} of them are taken"
        self.num_bytes = None if max_bytes_per_token is None else self.num_tokens * max_bytes_per_token

    def check(self, field: str, num_bytes: int) -> None:
        """Raises InvalidArgument naming `field` if `num_bytes` cannot fit."""
        if self.num_bytes is not None and num_bytes > self.num_bytes:
            raise InvalidArgument(
                field, f"{num_bytes:,} bytes do not fit; the limit is {self.num_bytes:,} bytes, for {self.name}"
            )

    def check_tokens(self, field: str, count: int) -> None:
        """Raises InvalidArgument naming `field` if `count` tokens cannot fit."""
        if count > self.num_tokens:
            raise InvalidArgument(field, f"at least {count:,} tokens do not fit in {self.name}")
