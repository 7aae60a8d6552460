"""Aborts exchanges of a rank that waits for others, from another thread of its process.

Gloo's wait cannot be interrupted, and its own abort does not end it: only closing the connection does. Therefore the
sockets that were opened during group creation are recorded.
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
    """The actions that free a rank from the exchanges of one epoch. Any thread may call `abort`; all other methods
    belong to the exchanging thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: list[Callable[[], object]] = []
        self._is_up = False

    def add(self, way: Callable[[], object]) -> None:
        """Registers an action that frees the rank from its next operations. Raises ExchangeAborted if the abort was
        already requested."""
        with self._lock:
            if self._is_up:
                raise ExchangeAborted("the epoch has ended")
            self._ways.append(way)

    def abort(self) -> None:
        """Frees the rank, which then raises. Calling it again frees the rank from operations started meanwhile."""
        with self._lock:
            self._is_up = True
            for way in self._ways:
                way()

    def reset(self) -> None:
        """Unregisters all actions after the rank has left the groups."""
        with self._lock:
            self._is_up = False
            self._ways.clear()


class Sockets:
    """The sockets that this process opens from now on until `complete`. Empty if /proc does not list them."""

    def __init__(self) -> None:
        self._before = found()
        self._opened: dict[int, str] | None = None

    def complete(self) -> None:
        """Ends the recording."""
        self._opened = self._new()

    def shut_down(self) -> int:
        """Shuts the connections down, which ends all receives on them, and returns their number. The owner still closes
        the sockets."""
        opened, there = self._opened or self._new(), found()
        # a file descriptor may have been reused
        return sum(shut_down(number) for number, name in opened.items() if there.get(number) == name)

    def _new(self) -> dict[int, str]:
        return {number: name for number, name in found().items() if self._before.get(number) != name}


def found() -> dict[int, str]:
    """The open sockets of this process: by file descriptor, the system's name."""
    names: dict[int, str] = {}
    with suppress(OSError):
        for path in FILES.iterdir():
            with suppress(OSError):  # it may be closed by now
                if (name := os.readlink(path)).startswith("socket:"):
                    names[int(path.name)] = name
    return names


def shut_down(number: int) -> bool:
    """Shuts a network connection down; returns whether it was one. Listening sockets are ignored: no thread waits on
    them, and libraries do not handle their shutdown."""
    try:
        with socket.socket(fileno=os.dup(number)) as found:
            is_connection = found.family in (socket.AF_INET, socket.AF_INET6) and not found.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            )
            if is_connection:
                found.shutdown(socket.SHUT_RDWR)
            return is_connection
    except OSError:  # closed meanwhile, or ended by the peer
        return False
