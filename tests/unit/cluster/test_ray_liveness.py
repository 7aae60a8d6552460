"""Liveness of a Ray node, checked by its port."""

import socket

import pytest

from coordinator.cluster.ray_liveness import answers, has_ended

HERE = "127.0.0.1"


def test_listening_port_is_reachable() -> None:
    with socket.create_server((HERE, 0)) as listening:
        port = listening.getsockname()[1]
        assert (answers(HERE, port), has_ended(HERE, port)) == (True, False)
    assert (answers(HERE, port), has_ended(HERE, port)) == (False, True)


def test_timeout_is_neither_reachable_nor_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert (answers(HERE, 1), has_ended(HERE, 1)) == (False, False)
