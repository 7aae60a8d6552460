"""Resource usage of a tenant."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec

Room = Callable[[int], AbstractContextManager[None]]
"""Returns a context manager in whose body a context with this number of tokens is created. Raises ResourceExhausted if
the context would exceed the tenant's quotas."""


def unlimited_room(_: int) -> AbstractContextManager[None]:
    """A Room without quotas."""
    return nullcontext()


class TenantUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Current usage of a tenant, except for storage. Documents that are being read count as contexts and tokens."""

    contexts: int = 0
    tokens: int = 0
    """Tokens of its contexts. A prefix shared by several contexts counts for each of them."""
    running: int = 0
    """Running generations."""
    waiting: int = 0
    """Queued generations."""
    uploads: int = 0
    """Documents that are being read."""
