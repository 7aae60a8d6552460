"""The coordinator as an actor. The composition root passes this class to Ray; this module does not depend on Ray."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from coordinator.cluster.ports import Fleet
from coordinator.service import Service, StartupProgress
from coordinator.telemetry import logs
from longleaf.errors import GroupFailed, InvalidArgument, LongleafError, RankLost
from longleaf.launch import BAD_INPUT
from longleaf.options import flag_names, with_flag_names
from longleaf.service_settings import ServiceConfig

NAME = "longleaf-coordinator"
NAMESPACE = "longleaf"

FAILED = 1
MAX_LOGS = 1000
"""Most log lines kept for the next caller."""


class StartResult(msgspec.Struct, frozen=True):
    """The result of a call: the port when the service is ready, or an error message for the user and the exit code of
    the process."""

    port: int = 0
    http: str = ""
    """Address of the HTTP gateway; empty if it is off."""
    notes: tuple[str, ...] = ()
    """After the start: warnings, such as settings that make the ranks slower than necessary, and the summary of the
    service. Later: events, such as lost ranks and the outcome of their recovery."""
    error: str = ""
    exit_code: int = 0


FLAGS = flag_names(ServiceConfig)


def describe(error: Exception) -> StartResult:
    """RankLost, GroupFailed and unexpected exceptions give exit code 1; every other LongleafError gives 2."""
    if not isinstance(error, LongleafError):
        return StartResult(error=repr(error), exit_code=FAILED)
    message = str(error)
    if isinstance(error, InvalidArgument) and error.field in FLAGS:
        message = f"{FLAGS[error.field]}: {error.description}"
    code = FAILED if isinstance(error, RankLost | GroupFailed) else BAD_INPUT
    return StartResult(error=with_flag_names(message, FLAGS), exit_code=code)


class StartupLogBuffer(logging.Handler):
    """Buffers log lines until they are read: the last `limit` of them, and a count of the older ones that were dropped.
    Needs a running event loop."""

    def __init__(self, formatter: logging.Formatter, limit: int = MAX_LOGS) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._loop = asyncio.get_running_loop()
        self._lines = deque[str](maxlen=limit)
        self._num_dropped = 0
        self._has_some = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Thread-safe."""
        is_first = not self._lines
        self._num_dropped += len(self._lines) == self._lines.maxlen
        self._lines.append(self.format(record))
        if is_first:
            with suppress(RuntimeError):  # the loop has ended, and with it every reader
                self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        if self._lines:  # otherwise they were read in the meantime
            self._has_some.set()

    async def wait(self) -> None:
        """Returns when the buffer is not empty."""
        await self._has_some.wait()

    def pop_lines(self) -> tuple[str, ...]:
        """Returns the buffered lines and clears the buffer."""
        self.acquire()
        try:
            lines, num_dropped = tuple(self._lines), self._num_dropped
            self._lines.clear()
            self._num_dropped = 0
            self._has_some.clear()
        finally:
            self.release()
        return (self._log_dropped(num_dropped), *lines) if num_dropped else lines

    def _log_dropped(self, count: int) -> str:
        message = f"{count:,} earlier lines were dropped: they were logged faster than they were read"
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, message, None, None))


class CoordinatorActor:
    """Runs one service. Errors are returned as values, because an exception would have to survive two serializers."""

    def __init__(self, config: ServiceConfig, make_fleet: Callable[[], Fleet]) -> None:
        self._service = Service(config, make_fleet())
        self._telemetry = config.telemetry
        self._is_stopping = False
        self._logs: StartupLogBuffer | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> StartResult:
        """Starts the service. Returns an empty result if the service is ended during the start."""
        starting = asyncio.create_task(self._service.start())
        ending = asyncio.create_task(self._service.wait_drained())
        await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return StartResult()
        try:
            notes = logs.format_start_notes(self._telemetry, self._service.notes)
            notes += logs.summarized(self._telemetry, self._service.summary)
            return StartResult(port=starting.result(), http=self._service.http, notes=notes)
        except Exception as error:
            await self._service.stop()
            return describe(error)

    async def loading(self) -> StartupProgress:
        """Progress of the start."""
        return self._service.loading

    async def end(self) -> None:
        """Drains the service: `start` or `wait` then returns. A second call ends it immediately."""
        self._service.drain()

    async def wait(self, until_logs: bool = False) -> StartResult:
        """Returns when the service is drained and ready to be stopped; a service that failed is stopped first. With
        `until_logs`, returns as soon as there are log lines; the caller then calls it again unless there is an
        error."""
        self._ending = self._ending or asyncio.create_task(self._service.wait())
        if until_logs and (notes := await self._wait_for_logs(self._ending)):
            return StartResult(notes=notes)
        try:
            await self._ending
        except asyncio.CancelledError:
            return StartResult()
        except Exception as error:
            if self._is_stopping:
                return StartResult()
            await self._service.stop()
            return msgspec.structs.replace(describe(error), exit_code=FAILED, notes=self._last_logs())
        return StartResult()

    async def _wait_for_logs(self, ending: asyncio.Task[None]) -> tuple[str, ...]:
        """Returns the log lines once there are any or the service has ended."""
        if self._logs is None:
            self._logs = StartupLogBuffer(logs.formatter(self._telemetry))
            for name in logs.LOGGERS:
                logging.getLogger(name).addHandler(self._logs)
        waiting = asyncio.create_task(self._logs.wait())
        await asyncio.wait([ending, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return self._logs.pop_lines()

    async def stop(self) -> StartResult:
        """Stops the service and returns the remaining log lines."""
        self._is_stopping = True
        await self._service.stop()
        return StartResult(notes=self._last_logs())

    def _last_logs(self) -> tuple[str, ...]:
        """The remaining log lines; detaches the log buffer."""
        if self._logs is None:
            return ()
        for name in logs.LOGGERS:
            logging.getLogger(name).removeHandler(self._logs)
        return self._logs.pop_lines()
