"""Whether the storage can be used: told once when that changes, and tried again ever more seldom."""

import asyncio
import logging

LEAST_SECONDS, MOST_SECONDS = 1.0, 60.0
log = logging.getLogger(__name__)


class Trouble:
    """What is wrong with a storage."""

    def __init__(self, what: str) -> None:
        """`what` is not done meanwhile."""
        self._what = what
        self.reason = ""
        """For people; empty: nothing."""
        self._seconds = LEAST_SECONDS

    def begin(self, reason: str) -> None:
        if not self.reason:
            log.warning("%s: not done for now, and the service goes on: %s", self._what, reason)
        self.reason = reason

    def end(self) -> None:
        if self.reason:
            log.warning("%s: done again", self._what)
        self.reason, self._seconds = "", LEAST_SECONDS

    async def wait(self) -> None:
        """Until the next try."""
        seconds, self._seconds = self._seconds, min(MOST_SECONDS, 2 * self._seconds)
        await asyncio.sleep(seconds)
