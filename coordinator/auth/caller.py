"""Who calls, and as whom."""

from contextvars import ContextVar

import msgspec

from longleaf.credentials import Quotas, Role
from longleaf.tenants import DEFAULT_TENANT


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who makes a call."""

    tenant: str = DEFAULT_TENANT
    role: Role = "user"
    quotas: Quotas = Quotas()
    """Of the tenant, as they are now."""
    is_alone: bool = True
    """No other tenant may come in."""

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"


CALLER: ContextVar[Caller] = ContextVar("CALLER")
"""Who makes the call for which code runs; set before anything else of a call is done."""
OWNER = Caller(role="admin")
"""Whoever reaches a service that asks nobody who they are."""
