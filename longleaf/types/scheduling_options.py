"""Scheduling parameters of a request."""

from typing import TypedDict

import msgspec

from longleaf.tenants import DEFAULT_TENANT

Account = tuple[str, str]
"""Unit of fair sharing: a tenant, and a client name within it."""


class SchedulingKwargs(TypedDict, total=False):
    """Scheduling parameters as keyword arguments."""

    priority: int
    """Higher runs first."""
    client: str
    """Client name for fair sharing; the address of the peer if empty."""


class SchedulingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A request that competes with others for the ranks."""

    priority: int = 0
    """Higher runs first."""
    client: str = ""
    """Client name for fair sharing; the address of the peer if empty."""
    tenant: str = DEFAULT_TENANT
    """Owner of the request. Set by the service, not by clients."""

    @property
    def account(self) -> Account:
        """Account for fair sharing."""
        return self.tenant, self.client
