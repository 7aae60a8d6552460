"""Errors of the trace exporter, logged at most once a minute."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)
QUIET_SECONDS = 60.0
LIBRARY = "opentelemetry"
HARMLESS = (f"{LIBRARY}.exporter.", f"{LIBRARY}.sdk.")
"""Errors whose messages contain no headers, which carry credentials."""


class ExportErrors(logging.Handler):
    """Replaces all other handlers of the library's logger, and forwards at most one message a minute. `clock` returns
    seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._reported: float | None = None
        self._num_more = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Thread-safe."""
        now = self._clock()
        if self._reported is not None and now - self._reported < QUIET_SECONDS:
            self._num_more += 1
            return
        summary = record.getMessage() if record.name.startswith(HARMLESS) else record.name
        more = f" ({self._num_more:,} more since the last line)" if self._num_more else ""
        self._reported, self._num_more = now, 0
        log.warning("traces: %s%s", summary, more)

    def set_up(self) -> None:
        """Installs the handler."""
        logger = logging.getLogger(LIBRARY)
        logger.addHandler(self)
        logger.propagate = False

    def take_down(self) -> None:
        """Restores the previous handlers."""
        logger = logging.getLogger(LIBRARY)
        logger.removeHandler(self)
        logger.propagate = True
