"""What a request claims against others."""

from typing import TypedDict

import msgspec


class ClaimOptions(TypedDict, total=False):
    """A claim as a caller gives it."""

    priority: int
    """Higher goes first."""
    client: str
    """Whom fair share counts; the address of the peer when empty."""


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A request that competes with others for the ranks."""

    priority: int = 0
    """Higher goes first."""
    client: str = ""
    """Whom fair share counts; the address of the peer when empty."""
