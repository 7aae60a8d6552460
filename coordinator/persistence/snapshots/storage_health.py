"""Health of the storage: logged once per change, retried with increasing delays."""

import asyncio
import logging
from collections.abc import Callable

from longleaf.backoff import backoff_delay

LEAST_SECONDS, MOST_SECONDS = 1.0, 60.0
log = logging.getLogger(__name__)


class StorageHealth:
    """The current error of a storage."""

    def __init__(self, what: str, on_change: Callable[[], None]) -> None:
        """`what` names the suspended work, and `on_change` is called when `reason` changes."""
        self._what = what
        self._on_change = on_change
        self.reason = ""
        """The reason, for the operator; empty if there is no error."""
        self._num_waits = 0
        """Waits since the storage was healthy."""

    def set_failed(self, reason: str) -> None:
        if not self.reason:
            log.warning("%s: failed, will retry: %s", self._what, reason)
        self._set_reason(reason)

    def set_healthy(self) -> None:
        if self.reason:
            log.warning("%s: succeeded again", self._what)
        self._num_waits = 0
        self._set_reason("")

    def _set_reason(self, reason: str) -> None:
        if reason != self.reason:
            self.reason = reason
            self._on_change()

    async def wait(self) -> None:
        """Waits until the next attempt."""
        self._num_waits += 1
        await asyncio.sleep(backoff_delay(self._num_waits, LEAST_SECONDS, MOST_SECONDS))
