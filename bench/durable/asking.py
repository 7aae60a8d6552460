"""Questions to a context, and when their answers came."""

import time
from typing import NamedTuple

from longleaf.client import AsyncClient
from longleaf.types import Delta, Recovering

QUESTION = (65, 66, 67)
ANSWERED = 8
"""Tokens of an answer."""


class Answered(NamedTuple):
    """Seconds from the call."""

    back_s: float
    """Until the last progress event of the restore; 0 without one."""
    first_token_s: float
    total_s: float
    token_ids: tuple[int, ...]
    lost_tokens: int
    """The highest number of tokens that was reported as missing."""


async def ask(client: AsyncClient, context: str | None, num_tokens: int = ANSWERED) -> Answered:
    """A greedy answer to a short question."""
    began, back, first, lost, ids = time.perf_counter(), 0.0, 0.0, 0, tuple[int, ...]()
    requested = client.generate(QUESTION, context=context, max_tokens=num_tokens, ignore_end_token=True)
    async for event in requested:
        now = time.perf_counter() - began
        if isinstance(event, Recovering):
            back, lost = now, max(lost, event.lost_tokens)
        elif isinstance(event, Delta):
            first, ids = first or now, ids + event.token_ids
    return Answered(back, first, time.perf_counter() - began, ids, lost)


async def ingest(client: AsyncClient, context: str, ids: tuple[int, ...]) -> float:
    """Seconds until the context is acknowledged."""
    began = time.perf_counter()
    await client.ingest(context, ids)
    return time.perf_counter() - began
