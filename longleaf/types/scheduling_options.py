"""What a request claims against others."""

from typing import TypedDict

import msgspec

from longleaf.tenants import DEFAULT_TENANT

Account = tuple[str, str]
"""Whom shares are counted for: a tenant, and what a client of it calls itself."""


class ClaimOptions(TypedDict, total=False):
    """A claim as a caller gives it."""

    priority: int
    """Higher goes first."""
    client: str
    """Whom fair share counts; the address of the peer when empty."""


class SchedulingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A request that competes with others for the ranks."""

    priority: int = 0
    """Higher goes first."""
    client: str = ""
    """Whom fair share counts; the address of the peer when empty."""
    tenant: str = DEFAULT_TENANT
    """Whose it is. The service knows; a client does not say."""

    @property
    def account(self) -> Account:
        """Whom shares are counted for."""
        return self.tenant, self.client
