"""Callers: a client view with the caller's credential, and the key for fair sharing."""

import asyncio
from collections.abc import Awaitable
from hashlib import sha256
from typing import TypeVar

from starlette.requests import Request

from longleaf.client.proxy_client import ProxyClient
from longleaf.errors import DeadlineExceeded, InvalidArgument, PermissionDenied, Unauthenticated

ANSWER_SECONDS = 10.0
"""Timeout of calls other than generations and ingests."""
T = TypeVar("T")


def client_of(request: Request) -> ProxyClient:
    """The client for this request. Raises Unauthenticated for a malformed credential, and PermissionDenied if it would
    be forwarded in plain text."""
    client: ProxyClient = request.app.state.client
    credential = credential_of(request)
    if credential is None:
        return client
    try:
        return client.with_credential(credential)
    except InvalidArgument as error:
        is_malformed = "plain text" not in error.description
        raise (Unauthenticated if is_malformed else PermissionDenied)(f"the credential {error.description}") from None


def caller_of(request: Request) -> str:
    """The key of limits for each caller: a hash of the credential, or the address without one. Raises Unauthenticated
    for a malformed credential."""
    credential = credential_of(request)
    # a hash, because credentials are not stored
    return peer_of(request) if credential is None else sha256(credential.encode()).hexdigest()


def owner_of(request: Request) -> str:
    """The owner of stored data: a hash of the credential. Callers without one have one owner in common, as they have
    one tenant. Raises Unauthenticated for a malformed credential."""
    credential = credential_of(request)
    return "" if credential is None else sha256(credential.encode()).hexdigest()


def credential_of(request: Request) -> str | None:
    """The credential in `Authorization: Bearer`, or else in `x-api-key`; None without one. Raises Unauthenticated for
    a malformed one."""
    given = request.headers.get("authorization")
    if given is None:
        return request.headers.get("x-api-key", "").strip() or None
    scheme, _, credential = given.partition(" ")
    credential = credential.strip()
    if scheme.lower() != "bearer" or not credential:
        raise Unauthenticated("authorization has another form")
    return credential


def peer_of(request: Request) -> str:
    """The address used for fair sharing if the caller sets no client name."""
    return request.client.host if request.client is not None else ""


async def with_deadline(call: Awaitable[T]) -> T:
    """The result of the call. Raises DeadlineExceeded after ANSWER_SECONDS, because the service may hang."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await call
    except TimeoutError:
        raise DeadlineExceeded("the service did not answer in time") from None
