"""Retries of calls that the service refused before they started, or never answered. The service may specify the delay
before the retry."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

import msgspec

from longleaf.backoff import backoff_delay
from longleaf.client.callbacks import Callback, notify
from longleaf.errors import LongleafError, ResourceExhausted, Unavailable
from longleaf.formatting import human_seconds

logger = logging.getLogger(__name__)

FIRST_LIMIT = 6
"""Retries of a call to a service that has never answered and may not exist."""
LONGEST_TIMEOUT = 1e9
"""Seconds; gRPC treats a much larger value, or infinity, as already expired."""


class Retry(msgspec.Struct, frozen=True):
    """A call that will be retried in `delay` seconds; `number` counts from 1."""

    call: str
    number: int
    delay: float
    error: LongleafError


OnRetry = Callable[[Retry], None]
Explain = Callable[[LongleafError], Awaitable[LongleafError]]


def log_retry(retry: Retry) -> None:
    """Logs a retry as one line."""
    logger.warning("%s: retry %d in %s: %s", retry.call, retry.number, human_seconds(retry.delay), retry.error)


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """Retry policy. Times in seconds.

    The delay starts at `first_delay` and doubles up to `longest_delay`. It is multiplied by a random factor in [0, 1),
    so that clients refused together do not retry together. A delay named by the service (RetryInfo) is added.
    """

    limit: int | None = None
    """Maximum number of retries of one call; 0 disables retries. None: as many as fit in `patience` if the service has
    answered this client before (it may be restarting), and FIRST_LIMIT otherwise."""
    first_delay: float = 0.25
    longest_delay: float = 5.0
    patience: float = 60.0
    """Longest time from the start of a call, or from its last progress, to its last retry."""

    def delay(self, number: int, error: LongleafError, drawn: float) -> float:
        """Seconds before retry `number`; `drawn` in [0, 1) is the random factor."""
        named = error.retry_seconds if isinstance(error, ResourceExhausted | Unavailable) else None
        return (named or 0.0) + drawn * backoff_delay(number, self.first_delay, self.longest_delay)


class Attempts:
    """The attempts of one call and their common time limit."""

    def __init__(
        self,
        call: str,
        timeout: float | None,
        retries: Retries,
        on_retry: Callback[Retry],
        explain: Explain,
        has_answered: Callable[[], bool],
    ) -> None:
        """`explain` may replace an error by a more specific one; `has_answered` returns whether the service has ever
        answered."""
        self._call = call
        self._has_answered = has_answered
        self._explain = explain
        self._deadline = None if timeout is None or timeout > LONGEST_TIMEOUT else time.monotonic() + timeout
        self._retries = retries
        self._on_retry = on_retry
        self.reset_limits()

    def reset_limits(self) -> None:
        """Restarts the retry limits after progress. The timeout is unchanged."""
        self._number = 0
        self._last_retry = time.monotonic() + self._retries.patience

    def time_left(self) -> float | None:
        """Seconds left for the next attempt; None if there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def wait(self, error: LongleafError, *, is_repeatable: bool) -> None:
        """Waits before the next attempt. Raises `error` if there is none, because a retry would not help, would
        exceed a limit, or might execute a call twice that is not `is_repeatable`."""
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
        await notify(self._on_retry, Retry(self._call, self._number, delay, error))
        await asyncio.sleep(delay)

    def _is_too_late(self, delay: float) -> bool:
        left = self.time_left()
        return time.monotonic() + delay > self._last_retry or (left is not None and delay > left)


def was_refused(error: LongleafError) -> bool:
    """Whether the service refused the call before it started and specified a retry delay."""
    return isinstance(error, ResourceExhausted | Unavailable) and error.retry_seconds is not None
