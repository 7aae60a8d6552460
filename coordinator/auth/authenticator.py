"""The interface of authentication."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from coordinator.auth.caller import OWNER, Caller


class Authenticator(Protocol):
    """Identifies the caller, or rejects the call."""

    @property
    def is_open(self) -> bool:
        """Whether every call is accepted."""
        ...

    def authenticate(self, metadata: Mapping[str, str | bytes], names: Iterable[str]) -> Caller:
        """The caller with these headers. `names` are proven by the client's certificate: its URI and DNS names, with
        the prefix `uri:` or `dns:`. Raises Unauthenticated."""
        ...


class AllowAnonymous:
    """An Authenticator that accepts every call."""

    is_open = True

    def authenticate(self, metadata: Mapping[str, str | bytes], names: Iterable[str]) -> Caller:
        """The operator, with every permission."""
        return OWNER
