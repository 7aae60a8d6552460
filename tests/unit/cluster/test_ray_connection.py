"""The checks of a Ray cluster before ranks join it, and the errors if it cannot be used."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster import ray_connection
from coordinator.cluster.ray_connection import connect
from longleaf.errors import StartError


class BusyRay:
    """A Ray package on a machine that is too busy to start it."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(AuthenticationError=KeyError)
        self.is_shut_down = False

    def init(self, **_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    def shutdown(self) -> None:
        self.is_shut_down = True


def test_start_timeout_of_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = BusyRay()
    monkeypatch.setattr(ray_connection, "ray_package", lambda: ray)
    with pytest.raises(StartError, match="cannot use Ray at this machine: .* timed out during startup"):
        connect(None, 1)
    assert ray.is_shut_down


def test_ray_bound_to_loopback_is_reported_immediately():
    """Ray listens only on the loopback if it finds no route to the internet; waiting does not change that."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = f"but one answers at 127.0.0.1:{port}, which .* with --node-ip-address=127.0.0.2$"
        with pytest.raises(StartError, match=message):
            connect(f"127.0.0.2:{port}", 1, patience=1e6, on_wait=lambda: pytest.fail("it waits"))


def test_unreachable_ray_is_retried():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    class Waits(Exception):
        pass

    def wait() -> None:
        raise Waits

    with pytest.raises(Waits):
        connect(f"127.0.0.2:{port}", 1, patience=1e6, on_wait=wait)
    with pytest.raises(StartError, match=f"no Ray cluster answers at 127.0.0.2:{port}: "):
        connect(f"127.0.0.2:{port}", 1, on_wait=wait)
