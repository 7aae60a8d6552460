"""Waiting until something is so."""

import asyncio
from collections.abc import Callable


async def comes(is_so: Callable[[], object], seconds: float = 10.0) -> None:
    """Has the event loop turn, and threads work, until it is so. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not is_so():  # noqa: ASYNC110 - the condition has no event to wait for
            await asyncio.sleep(0.001)
