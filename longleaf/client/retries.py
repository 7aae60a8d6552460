"""When a call is made again: what the service refused before it began, or never answered, after a wait it may name."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

import msgspec

from longleaf.client.callbacks import Callback, tell
from longleaf.errors import LongleafError, ResourceExhausted, Unavailable
from longleaf.formatting import human_seconds

logger = logging.getLogger(__name__)

FIRST_LIMIT = 6
"""Retries of a call to a service that has never answered: it may not be there at all."""
LONGEST_TIMEOUT = 1e9
"""Seconds; gRPC takes a far larger one, or infinity, for a time that has passed."""


class Retry(msgspec.Struct, frozen=True):
    """A call that will be made again in `delay` seconds; `number` counts from 1."""

    call: str
    number: int
    delay: float
    error: LongleafError


OnRetry = Callable[[Retry], None]
Explain = Callable[[LongleafError], Awaitable[LongleafError]]


def log_retry(retry: Retry) -> None:
    """One line in the log of this module."""
    logger.warning("%s: retry %d in %s: %s", retry.call, retry.number, human_seconds(retry.delay), retry.error)


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how long to try. Times in seconds.

    The wait grows from `first_delay` by doubling up to `longest_delay`, of which a random part is taken, so that
    clients refused together do not come back together. A wait that the service names (RetryInfo) comes before it.
    """

    limit: int | None = None
    """Most retries of one call; 0 never tries again. None: as many as `patience` allows where the service has answered
    this client before, for it may have been started again, and FIRST_LIMIT otherwise."""
    first_delay: float = 0.25
    longest_delay: float = 5.0
    patience: float = 60.0
    """Longest time from a call's begin, or from where it last got further, to its last retry."""

    def delay(self, number: int, error: LongleafError, drawn: float) -> float:
        """Seconds before retry `number`; `drawn` in [0, 1) is the random part."""
        named = error.retry_seconds if isinstance(error, ResourceExhausted | Unavailable) else None
        return (named or 0.0) + drawn * min(self.longest_delay, self.first_delay * 2 ** (number - 1))


class Attempts:
    """The attempts of one call and the time they have together."""

    def __init__(
        self,
        call: str,
        timeout: float | None,
        retries: Retries,
        on_retry: Callback[Retry],
        explain: Explain,
        has_answered: Callable[[], bool],
    ) -> None:
        """`explain` may know more of an error than the library does; `has_answered` says whether the service has ever
        answered."""
        self._call = call
        self._has_answered = has_answered
        self._explain = explain
        self._deadline = None if timeout is None or timeout > LONGEST_TIMEOUT else time.monotonic() + timeout
        self._retries = retries
        self._on_retry = on_retry
        self.renew()

    def renew(self) -> None:
        """The call got further: what comes counts from here. A timeout stays what it is."""
        self._number = 0
        self._last_retry = time.monotonic() + self._retries.patience

    def time_left(self) -> float | None:
        """Seconds that the next attempt may take; None when there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def wait(self, error: LongleafError, *, is_repeatable: bool) -> None:
        """Waits before the next attempt. Raises `error` when there is none: it would not help, might do something
        twice (unless `is_repeatable`), or would come too late."""
        error = await self._explain(error)
        self._number += 1
        delay = self._retries.delay(self._number, error, random.random())
        may_help = was_refused(error) or (is_repeatable and isinstance(error, Unavailable))
        limit = self._retries.limit
        if limit is None and not self._has_answered():
            limit = FIRST_LIMIT
        is_last = limit is not None and self._number > limit
        if not may_help or is_last or self._is_too_late(delay):
            raise error
        await tell(self._on_retry, Retry(self._call, self._number, delay, error))
        await asyncio.sleep(delay)

    def _is_too_late(self, delay: float) -> bool:
        left = self.time_left()
        return time.monotonic() + delay > self._last_retry or (left is not None and delay > left)


def was_refused(error: LongleafError) -> bool:
    """Nothing was begun, and waiting helps."""
    return isinstance(error, ResourceExhausted | Unavailable) and error.retry_seconds is not None
