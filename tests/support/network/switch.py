"""The way to a server of a test, on which connections are carried, refused, or get no answer."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from threading import Event, Thread


class Switch:
    """Forwards connections from `port` to `target`, both on the loopback."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._is_carrying = Event()
        self._is_carrying.set()
        self._ends: list[socket.socket] = []
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port))
        Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError), closing(sink):
            while content := source.recv(1 << 16):
                self._is_carrying.wait()
                sink.sendall(content)

    def hang(self) -> None:
        """Connections are accepted, but no data is forwarded."""
        self._is_carrying.clear()

    def refuse(self) -> None:
        """Connections end, and others are refused."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def carry(self) -> None:
        """All is well again, after either."""
        self._is_carrying.set()
        if self._listener.fileno() < 0:
            self._listener = self._listen(self.port)


@contextmanager
def switch(target: int) -> Iterator[Switch]:
    made = Switch(target)
    try:
        yield made
    finally:
        made.carry()
        made.refuse()
