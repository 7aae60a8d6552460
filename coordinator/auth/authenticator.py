"""Tells who calls."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from coordinator.auth.caller import OWNER, Caller


class Authenticator(Protocol):
    """Tells who calls, or refuses."""

    @property
    def is_open(self) -> bool:
        """Whether it lets everybody in."""
        ...

    def authenticate(self, metadata: Mapping[str, str | bytes], names: Iterable[str]) -> Caller:
        """Who calls with these headers, over a connection whose client has proven to bear these `names`: the URI and
        DNS names of its certificate, with `uri:` or `dns:` in front. Raises Unauthenticated."""
        ...


class AllowAnonymous:
    """An Authenticator that asks for nothing."""

    is_open = True

    def authenticate(self, metadata: Mapping[str, str | bytes], names: Iterable[str]) -> Caller:
        """The one who runs the service."""
        return OWNER
