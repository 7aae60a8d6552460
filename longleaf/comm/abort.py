"""What frees a rank that waits in an exchange for others that will not come: another thread of its process puts it up.

Gloo listens to nobody while it waits, and its own abort frees nobody: what it waits for must end, and that is a
connection. So it is known which sockets were opened while the groups were made.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from longleaf.errors import ExchangeAborted

FILES = Path("/proc/self/fd")


class ExchangeAborter:
    """The ways in which a rank is freed from the exchanges of one epoch. Any thread may put it up; the one that
    exchanges does all else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: list[Callable[[], object]] = []
        self._is_up = False

    def add(self, way: Callable[[], object]) -> None:
        """Notes how this rank is freed from what it does from now on. Raises ExchangeAborted if it is not to begin
        that."""
        with self._lock:
            if self._is_up:
                raise ExchangeAborted("the epoch has ended")
            self._ways.append(way)

    def put_up(self) -> None:
        """Frees the rank: it raises, or is about to. Once more it frees it from what it has begun meanwhile."""
        with self._lock:
            self._is_up = True
            for way in self._ways:
                way()

    def take_down(self) -> None:
        """Nothing is to be freed any more: the rank has left the groups."""
        with self._lock:
            self._is_up = False
            self._ways.clear()


class Sockets:
    """The sockets that this process opens from now on until it is `complete`. Where /proc does not tell, there are
    none."""

    def __init__(self) -> None:
        self._before = found()
        self._opened: dict[int, str] | None = None

    def complete(self) -> None:
        """What is opened from now on is of something else."""
        self._opened = self._new()

    def shut_down(self) -> int:
        """Ends the connections, and by that the waiting for what should come over them; how many. The sockets are
        their owner's to close."""
        opened, there = self._opened or self._new(), found()
        # a number may be that of another file by now
        return sum(shut_down(number) for number, name in opened.items() if there.get(number) == name)

    def _new(self) -> dict[int, str]:
        return {number: name for number, name in found().items() if self._before.get(number) != name}


def found() -> dict[int, str]:
    """The sockets that this process has open: by the number of the file, the system's name."""
    names: dict[int, str] = {}
    with suppress(OSError):
        for path in FILES.iterdir():
            with suppress(OSError):  # it may be closed by now
                if (name := os.readlink(path)).startswith("socket:"):
                    names[int(path.name)] = name
    return names


def shut_down(number: int) -> bool:
    """Ends a connection over a network; whether it was one. Who listens is left alone: nobody waits for that, and
    libraries are not prepared for its end."""
    try:
        with socket.socket(fileno=os.dup(number)) as found:
            is_connection = found.family in (socket.AF_INET, socket.AF_INET6) and not found.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            )
            if is_connection:
                found.shutdown(socket.SHUT_RDWR)
            return is_connection
    except OSError:  # closed by now, or ended by the other side
        return False
