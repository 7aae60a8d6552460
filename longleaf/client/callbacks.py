"""What a caller is told by a function of its own."""

import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

from longleaf.types import IngestProgress

T = TypeVar("T")
Callback = Callable[[T], Awaitable[None] | None]
"""A function, or a coroutine function, which is awaited."""
OnProgress = Callable[[IngestProgress], None]


async def tell(callback: Callback[T], updates: T) -> None:
    """Raises what the callback raises."""
    answer = callback(updates)
    if inspect.isawaitable(answer):
        await answer
