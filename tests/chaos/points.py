"""Fault points in a process. Only services that these tests start have them: the tests replace functions from outside,
and product code never checks for tests."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, NamedTuple

JOINING = "while joining"
LAYOUT = "before the layout"
READ = "before parts of the weights are read"
TENSOR = "when a tensor of the weights is read"
STEP = "before a step"
CHUNK = "half of a run"
BROADCAST = "before broadcast"
ANSWER = "before the answer"
MOVE = "in a move"
COMMIT = "after commit"
PUBLISH = "before publishing"
BEFORE_KEEP = "before a change of contexts is kept"
AFTER_KEEP = "after a change of contexts is kept"
SAVE = "before a piece is written"
SAVED = "a piece is written"
FETCH = "before a piece is read"
RESTORE = "before a fetched piece is restored"
MANIFEST = "before a manifest is written"
WRITTEN = "a manifest is written"
RECORDED = "a snapshot is kept"
NOTE = "before a context is noted"
DELETE = "before something on storage is deleted"
EVICT = "when a segment is evicted"
CALL = "when an evicted segment is needed"
FOREVER = 100_000
HUGE = 1 << 40
"""More bytes than any limited process can allocate."""


class Fault(NamedTuple):
    """A fault that fires when its point is reached for the given time."""

    point: str
    act: str
    turn: int = 1
    pid: int = 0
    """Process to kill; 0: the process itself."""


def kill(fault: Fault) -> None:
    os.kill(fault.pid or os.getpid(), signal.SIGKILL)


def stop(fault: Fault) -> None:
    """Suspends all threads of the process: heartbeats stop."""
    os.kill(os.getpid(), signal.SIGSTOP)


def spin(fault: Fault) -> None:
    """Keeps the interpreter busy; other threads still run."""
    while True:
        pass


def sleep(fault: Fault) -> None:
    """Blocks in C without the GIL, like a hanging library: heartbeats continue."""
    time.sleep(FOREVER)


def hold(fault: Fault) -> None:
    """Blocks in C with the GIL: heartbeats stop."""
    ctypes.PyDLL(None).sleep(FOREVER)


def fail(fault: Fault) -> None:
    raise RuntimeError(f"a fault {fault.point}")


def allocate(fault: Fault) -> None:
    """Allocates more memory in torch than available."""
    import torch

    torch.empty(HUGE, dtype=torch.uint8)


ACTS: dict[str, Callable[[Fault], None]] = {
    "kill": kill,
    "stop": stop,
    "spin": spin,
    "sleep": sleep,
    "hold": hold,
    "fail": fail,
    "allocate": allocate,
}


class Points:
    """The fault points of a process. They do nothing until a fault is armed, which fires once."""

    def __init__(self) -> None:
        self._armed: Fault | None = None
        self._num_left = 0

    def arm(self, fault: Fault | None) -> None:
        """Replaces the armed fault; None disarms."""
        self._armed = None
        if fault is not None:
            self._num_left = fault.turn
            self._armed = fault

    def reach(self, point: str) -> None:
        """Called when the process reaches a point."""
        fault = self._armed
        if fault is None or fault.point != point:
            return
        self._num_left -= 1
        if self._num_left <= 0:
            self._armed = None
            ACTS[fault.act](fault)


class Probe(threading.Thread):
    """Thread that serves requests of a test at a Unix socket in a folder."""

    def __init__(self, folder: Path, answers: dict[str, Callable[..., Any]]) -> None:
        super().__init__(name="probe", daemon=True)
        self._answers = answers
        self._listener = Listener(str(folder / str(os.getpid())), family="AF_UNIX")

    def run(self) -> None:
        while True:
            with self._listener.accept() as connection:
                name, arguments = connection.recv()
                try:
                    connection.send(self._answers[name](*arguments))
                except Exception as error:
                    connection.send(error)


def ask(folder: Path, pid: int, name: str, *arguments: object) -> Any:
    """Returns the response of a process's probe. Raises the exception of the call, and OSError or EOFError if the
    process is gone."""
    with Client(str(folder / str(pid)), family="AF_UNIX") as connection:
        connection.send((name, arguments))
        found = connection.recv()
    if isinstance(found, Exception):
        raise found
    return found
