"""What a tenant takes of a service."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec

Room = Callable[[int], AbstractContextManager[None]]
"""Around what makes a context of so many tokens. Raises ResourceExhausted where its tenant may have no such one."""


def any_room(_: int) -> AbstractContextManager[None]:
    """For whoever has no quotas."""
    return nullcontext()


class TenantUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant takes now, but for storage; documents that are being read count as contexts and tokens already."""

    contexts: int = 0
    tokens: int = 0
    """Of its contexts. Those that share a beginning count it each."""
    running: int = 0
    """Generations that run."""
    waiting: int = 0
    """Generations that wait for room."""
    uploads: int = 0
    """Documents that are being read."""
