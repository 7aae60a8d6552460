"""The service as a subprocess: command line, startup and shutdown."""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import IO, Self

import msgspec

from longleaf.errors import LongleafError, StartError, Unavailable
from longleaf.extras import require_extra
from longleaf.formatting import human_seconds
from longleaf.options import to_argument
from longleaf.rank_choice import choose_ranks, this_machine
from longleaf.service_settings import GatewayConfig, ServiceConfig
from longleaf.weights_choice import with_weights

LISTENING = "listening on "
"""Prefix of the line with the address, which the service prints when it is ready."""
ERROR = "error: "
BAD_INPUT = 2
"""Exit code of a service with invalid settings."""
STOP_SECONDS = 60.0
SHOWN_LINES = 5
"""Last lines of a failed service's log to show."""


def labeled(label: str, text: str) -> str:
    """A line of the start-up summary, aligned with the line that has the address."""
    return f"{label:<{len(LISTENING)}}{text}"


def coordinator_command(config: ServiceConfig) -> list[str]:
    """The command that serves with these settings.

    Raises InvalidArgument naming the first setting that is invalid, and StartError if the server is not installed.
    """
    return ready_command(ready_config(config))


def ready_command(config: ServiceConfig) -> list[str]:
    """The command that serves with settings from `ready_config`."""
    return _python("coordinator", config)


def ready_config(config: ServiceConfig, notify: Callable[[str], None] = lambda _: None) -> ServiceConfig:
    """The settings as the service takes them: valid, complete and independent of the working directory, because ranks
    may be in another folder. `notify` receives the choices that the user should know.

    Raises InvalidArgument naming the first setting that is invalid, and StartError if the server is not installed.
    """
    require_extra("server", "longleaf serve")
    machine = this_machine()
    config = choose_ranks(config, machine)
    config.check()
    return with_weights(config, machine.num_gpus, notify).with_absolute_paths()


def gateway_command(config: GatewayConfig) -> list[str]:
    """The command that runs a gateway. The gateway checks the settings."""
    return _python("gateway", config)


def _python(module: str, config: msgspec.Struct) -> list[str]:
    # -P: a folder named `tokenizers` in the working directory must not shadow the library.
    return [sys.executable, "-P", "-m", module, to_argument(config)]


class ServiceProcess:
    """A service process that ends with its `with` block.

    with ServiceProcess(command) as service:
        address = service.wait_ready(timeout)
    """

    def __init__(self, command: list[str], start: Callable[..., "subprocess.Popen[str]"] = subprocess.Popen) -> None:
        """`start` is called like subprocess.Popen."""
        self._command = command
        self._start = start
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        # A new session: an interrupt in the terminal ends the client first, which then stops the service.
        self._process = self._start(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        return self

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def _read(self, output: IO[str]) -> None:
        """Drains the pipe, because a full pipe would block the service."""
        with output:
            for line in output:
                self._lines.put(line.rstrip())
        self._lines.put(None)

    def wait_ready(self, timeout: float) -> str:
        """HOST:PORT of the service. Raises StartError for invalid settings, or if it is not ready within `timeout`
        seconds, and Unavailable if it fails."""
        deadline = monotonic() + timeout
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - monotonic()))
            except queue.Empty:
                raise StartError(f"the service was not ready after {human_seconds(timeout)}{self._tail()}") from None
            if line is None:
                raise self._failure(self._process.wait())
            if line.startswith(LISTENING):
                return line.removeprefix(LISTENING)

    def _failure(self, code: int) -> LongleafError:
        """The error of a service that exited, with the end of its log."""
        last = self._last_lines()
        if last and last[-1].startswith(ERROR):
            message = last[-1].removeprefix(ERROR)
            return StartError(message) if code == BAD_INPUT else Unavailable(message)
        return Unavailable(f"the service ended with exit code {code}{self._tail()}")

    def _tail(self) -> str:
        return "".join(f"\n  {line}" for line in self._last_lines())

    def _last_lines(self) -> list[str]:
        self._log.seek(0)
        return list(deque((line.rstrip() for line in self._log if line.strip()), maxlen=SHOWN_LINES))

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(STOP_SECONDS)
        self._log.close()
