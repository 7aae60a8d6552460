"""Errors of the trace exporter, logged at most once a minute."""

import logging
import time
from collections.abc import Callable

from coordinator.throttle import Throttle

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
        self._throttle = Throttle(QUIET_SECONDS, clock=clock)

    def emit(self, record: logging.LogRecord) -> None:
        """Thread-safe."""
        if not self._throttle.admit():
            return
        summary = record.getMessage() if record.name.startswith(HARMLESS) else record.name
        num_more = self._throttle.pop_num_dropped()
        more = f" ({num_more:,} more since the last line)" if num_more else ""
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
