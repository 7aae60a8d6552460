"""The identity of a caller."""

from contextvars import ContextVar

import msgspec

from longleaf.credentials import Quotas, Role
from longleaf.tenants import DEFAULT_TENANT


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a caller."""

    tenant: str = DEFAULT_TENANT
    role: Role = "user"
    quotas: Quotas = Quotas()
    """Current quotas of the tenant."""
    is_alone: bool = True
    """No other tenant can authenticate."""

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"


CALLER: ContextVar[Caller] = ContextVar("CALLER")
"""The caller of the current RPC; set before anything else in a call."""
OWNER = Caller(role="admin")
"""The caller of every RPC where authentication is off."""
