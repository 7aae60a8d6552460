"""The check of a Ray cluster's authentication mode. tests/e2e/test_ray_tokens.py tests it against a Ray cluster."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from coordinator.cluster import ray_auth_check
from coordinator.cluster.ray_auth_check import CALL, check_ray_auth
from longleaf.errors import StartError


class FakeRayHead(grpc.GenericRpcHandler):
    """Answers Ray's call with a fixed status code."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._code is not grpc.StatusCode.OK:
                context.abort(self._code, "no")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer) if handler_call_details.method == CALL else None


@contextmanager
def ray_head(code: grpc.StatusCode) -> Iterator[str]:
    """Runs a server; yields its address."""
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, [FakeRayHead(code)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.mark.parametrize("mode", ["token", "Token", "", "disabled", "unheard of"])
@pytest.mark.parametrize(
    ("code", "with_token", "without"),
    [
        (grpc.StatusCode.OK, "the cluster requires no token", ""),
        (grpc.StatusCode.UNAUTHENTICATED, "it rejects the token", "it requires a token"),
        (grpc.StatusCode.UNAVAILABLE, "", ""),
        (grpc.StatusCode.UNIMPLEMENTED, "", ""),
    ],
)
def test_token_must_match_the_cluster(
    monkeypatch: pytest.MonkeyPatch, mode: str, code: grpc.StatusCode, with_token: str, without: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(ray_auth_check, "_headers", lambda: {"Authorization": "Bearer another"})
    expected = with_token if mode.lower() == "token" else without
    reported = ""
    with ray_head(code) as address:
        try:
            check_ray_auth(address)
        except StartError as error:
            reported = str(error).removeprefix(f"ray_address: the Ray cluster at {address} cannot be joined: ")
    assert (reported.startswith(expected), bool(reported)) == (True, bool(expected))


def test_missing_token_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(ray_auth_check, "_headers", dict)
    with (
        ray_head(grpc.StatusCode.UNAUTHENTICATED) as address,
        pytest.raises(
            StartError,
            match="RAY_AUTH_MODE=token is set, but no token was found: put the cluster's token in RAY_AUTH_TOKEN",
        ),
    ):
        check_ray_auth(address)


def test_silent_head_passes_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_auth_check, "CALL_SECONDS", 0.2)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_ray_auth(f"127.0.0.1:{server.getsockname()[1]}")


def test_encrypted_cluster_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with ray_head(grpc.StatusCode.OK) as address:
        check_ray_auth(address)
