"""Who calls: a view of the client that bears the caller's credential, and whom a fair share is counted for."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

from longleaf.client.proxy_client import ProxyClient
from longleaf.errors import DeadlineExceeded, InvalidArgument, PermissionDenied, Unauthenticated

ANSWER_SECONDS = 10.0
"""How long the service may take for what is no generation and no document."""
T = TypeVar("T")


def client_of(request: Request) -> ProxyClient:
    """The client of this call. Raises Unauthenticated for what is no credential, and PermissionDenied where it would
    travel on in plain text."""
    client: ProxyClient = request.app.state.client
    given = request.headers.get("authorization")
    if given is None:
        return client
    scheme, _, credential = given.partition(" ")
    credential = credential.strip()
    if scheme.lower() != "bearer" or not credential:
        raise Unauthenticated("authorization has another form")
    try:
        return client.bearing(credential)
    except InvalidArgument as error:
        is_malformed = "plain text" not in error.description
        raise (Unauthenticated if is_malformed else PermissionDenied)(f"the credential {error.description}") from None


def peer_of(request: Request) -> str:
    """The address that a fair share is counted for where the caller names nobody."""
    return request.client.host if request.client is not None else ""


async def in_time(call: Awaitable[T]) -> T:
    """What the service answers. Raises DeadlineExceeded where it takes too long: it may stand still."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await call
    except TimeoutError:
        raise DeadlineExceeded("the service did not answer in time") from None
