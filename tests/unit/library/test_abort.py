"""The abort that frees a rank waiting for others: the order of its setup, the waits that it ends, and those that it
does not affect."""

import socket
import threading

import pytest

from longleaf.comm.abort import ExchangeAborter, Sockets
from longleaf.errors import ExchangeAborted


def test_running_exchange_is_released_and_later_ones_do_not_start():
    fence, freed = ExchangeAborter(), []
    fence.add(lambda: freed.append("early"))
    fence.abort()
    with pytest.raises(ExchangeAborted):
        fence.add(lambda: freed.append("late"))
    assert freed == ["early"]
    fence.reset()
    fence.add(lambda: freed.append("next"))
    fence.abort()
    assert freed == ["early", "next"]


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    one = socket.create_connection(listener.getsockname())
    return one, listener.accept()[0]


def test_only_connections_opened_meanwhile_are_closed():
    with socket.create_server(("127.0.0.1", 0)) as old, socket.socketpair()[0] as plain:
        before = pair(old)
        sockets = Sockets()
        new = socket.create_server(("127.0.0.1", 0))
        meanwhile = pair(new)
        sockets.complete()
        later = pair(new)
        received = []
        waiting = threading.Thread(target=lambda: received.append(meanwhile[0].recv(1)))
        waiting.start()
        assert sockets.shut_down() == 2
        waiting.join(60)
        assert received == [b""]
        for one, other in (before, later, pair(new)):  # the remaining listeners
            one.send(b"x")
            assert other.recv(1) == b"x"
            one.close()
            other.close()
        assert plain.fileno() >= 0
        for one in (*meanwhile, new):
            one.close()


def test_reused_file_descriptor_is_not_closed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets = Sockets()
        gone = pair(listener)
        sockets.complete()
        numbers = {one.fileno() for one in gone}
        for one in gone:
            one.close()
        found = pair(listener)
        assert {one.fileno() for one in found} == numbers, "the system gives the lowest ones"
        assert sockets.shut_down() == 0
        found[0].send(b"x")
        assert found[1].recv(1) == b"x"
        for one in found:
            one.close()
