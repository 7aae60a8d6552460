"""Whether a node of Ray lives, by its own port."""

import socket

import pytest

from coordinator.cluster.ray_liveness import answers, has_ended

HERE = "127.0.0.1"


def test_a_port_on_which_somebody_listens() -> None:
    with socket.create_server((HERE, 0)) as listening:
        port = listening.getsockname()[1]
        assert (answers(HERE, port), has_ended(HERE, port)) == (True, False)
    assert (answers(HERE, port), has_ended(HERE, port)) == (False, True)


def test_a_machine_that_says_nothing_may_only_be_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert (answers(HERE, 1), has_ended(HERE, 1)) == (False, False)
