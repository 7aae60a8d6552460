"""Checks whether a Ray cluster accepts this process.

If a token is rejected, Ray retries for 20 seconds, writes many lines to standard error, and reports no reason. If this
process uses a token but the cluster does not, actors die when they are created.
"""

import os
from collections.abc import Mapping
from typing import Any

import grpc

from longleaf.errors import StartError

CALL = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
"""A read-only method of Ray's own service, without arguments."""
CALL_SECONDS = 5.0
MODE = "RAY_AUTH_MODE"
PLACES = "RAY_AUTH_TOKEN, or in the file RAY_AUTH_TOKEN_PATH"
UNASKED = (
    f"the cluster requires no token, but {MODE}=token is set here: start the cluster with {MODE}=token, or unset {MODE}"
)
OPEN = f"it requires a token: set {MODE}=token, and put the cluster's token in {PLACES}"
MISSING = f"{MODE}=token is set, but no token was found: put the cluster's token in {PLACES}"
UNKNOWN = f"check that {MODE} has the same value here and there, and that the cluster's token is in {PLACES}"
REFUSED = f"it rejects the token: put the cluster's token in {PLACES}"


def check_ray_auth(address: str) -> None:
    """Raises StartError if the cluster whose head listens at `address` (HOST:PORT) rejects this process's token, or if
    only one of the two requires a token. Ray reports other errors itself."""
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return  # Ray reports this later
    asks = _refuses(address, {})
    if asks is None:
        return
    if os.environ.get(MODE, "").lower() != "token":
        if asks:
            raise _cannot_join(address, OPEN)
    elif not asks:
        raise _cannot_join(address, UNASKED)
    elif not (headers := _headers()):
        raise _cannot_join(address, MISSING)
    elif _refuses(address, headers):
        raise _cannot_join(address, REFUSED)


def _cannot_join(address: str, why: str) -> StartError:
    return StartError(f"ray_address: the Ray cluster at {address} cannot be joined: {why}")


def _headers() -> Mapping[str, str]:
    """The authentication headers that Ray would send; empty without a token."""
    import ray  # imported late, because it reads the environment at import

    untyped: Any = ray
    loader = untyped._raylet.AuthenticationTokenLoader.instance()
    try:
        return loader.get_token_for_http_header() if loader.has_token() else {}
    except Exception:  # the token file cannot be read
        return {}


def _refuses(address: str, headers: Mapping[str, str]) -> bool | None:
    """Whether the cluster rejects a call because of its token; None for any other error, or if there is no answer."""
    channel: Any = grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)])
    with channel:
        try:
            channel.unary_unary(CALL)(
                b"", metadata=tuple((name.lower(), text) for name, text in headers.items()), timeout=CALL_SECONDS
            )
        except grpc.RpcError as error:
            failed: Any = error
            return True if failed.code() is grpc.StatusCode.UNAUTHENTICATED else None
    return False
