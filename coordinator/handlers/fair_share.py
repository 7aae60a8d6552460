"""Fair shares of clients and tenants in a shared capacity."""

from collections import Counter
from collections.abc import Iterator, Set
from typing import NamedTuple

from longleaf.types import Account

CLIENT_SHARE = 1 / 2
TENANT_SHARE = 1 / 2
"""Applies if there are several tenants. The number of clients of a tenant is not limited."""


class ShareLimit(NamedTuple):
    """The part of the capacity that a tenant, or one of its clients, may use."""

    part: float
    tenant: str
    client: str | None = None

    @property
    def owner_of(self) -> str:
        """The owner, for error messages."""
        return f"tenant {self.tenant}" if self.client is None else f"client {self.client!r}"

    def is_theirs(self, account: Account) -> bool:
        """Whether the usage of the account counts toward this limit."""
        return account == (self.tenant, account[1] if self.client is None else self.client)


def shares_of(account: Account, tenant_share: float) -> Iterator[ShareLimit]:
    """The limits that apply to an account. With a `tenant_share` of 1 the tenant has no limit."""
    yield ShareLimit(CLIENT_SHARE, *account)
    yield from tenant_shares_of(account, tenant_share)


def tenant_shares_of(account: Account, tenant_share: float) -> Iterator[ShareLimit]:
    """As `shares_of`, without a limit for the client."""
    if tenant_share < 1:
        yield ShareLimit(tenant_share, account[0])


def eviction_victim(usage: Counter[str], candidates: Set[str], tenant: str) -> str | None:
    """The tenant among `candidates` that must free capacity for `tenant`: the one that holds most. None if it is
    another tenant and holds no more than `tenant` does."""
    found = max(candidates, key=lambda other: (usage[other], other == tenant), default=None)
    return found if found == tenant or usage[found or ""] > usage[tenant] else None
