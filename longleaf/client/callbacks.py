"""Callbacks that are plain functions or coroutine functions."""

import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

from longleaf.types import IngestProgress

T = TypeVar("T")
Callback = Callable[[T], Awaitable[None] | None]
"""A function, or a coroutine function, which is awaited."""
OnProgress = Callable[[IngestProgress], None]


async def notify(callback: Callback[T], updates: T) -> None:
    """Calls the callback, and awaits its result if there is one. Its exceptions propagate."""
    answer = callback(updates)
    if inspect.isawaitable(answer):
        await answer
