"""How much one client, and one tenant, may have of what all of them share."""

from collections import Counter
from collections.abc import Iterator, Set
from typing import NamedTuple

from longleaf.types import Account

CLIENT_SHARE = 1 / 2
TENANT_SHARE = 1 / 2
"""Where there are several tenants; a tenant has as many clients as it likes."""


class ShareLimit(NamedTuple):
    """The part of the whole that a tenant may have, or one client of it."""

    part: float
    tenant: str
    client: str | None = None

    @property
    def whose(self) -> str:
        """For its messages."""
        return f"the tenant {self.tenant}" if self.client is None else f"client {self.client!r}"

    def is_theirs(self, account: Account) -> bool:
        """Whether what that account has counts."""
        return account == (self.tenant, account[1] if self.client is None else self.client)


def shares_of(account: Account, tenant_share: float) -> Iterator[ShareLimit]:
    """Those that an account has to keep to, with what its tenant may have, which is all for 1."""
    yield ShareLimit(CLIENT_SHARE, *account)
    if tenant_share < 1:
        yield ShareLimit(tenant_share, account[0])


def loser_of(held: Counter[str], losers: Set[str], tenant: str) -> str | None:
    """Which of these tenants is to make room for `tenant`: the one that has most, and none that has no more than it."""
    found = max(losers, key=lambda other: (held[other], other == tenant), default=None)
    return found if found == tenant or held[found or ""] > held[tenant] else None
