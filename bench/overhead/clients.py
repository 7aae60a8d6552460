"""The clients that read, in a process of their own."""

import asyncio

from longleaf.client import AsyncClient
from longleaf.types import Delta

CONTEXT = "overhead"


def ingest(address: str, ids: list[int]) -> None:
    """Reads the document."""

    async def call() -> None:
        async with AsyncClient(address) as client:
            await client.ingest(CONTEXT, tuple(ids))

    asyncio.run(call())


def ask(address: str, batch: int, num_tokens: int) -> int:
    """Reads `batch` streams together; the deltas that came."""

    async def stream(client: AsyncClient, seed: int) -> int:
        answer = client.generate([65 + seed % 26], context=CONTEXT, max_tokens=num_tokens, ignore_end_token=True)
        return len([event async for event in answer if isinstance(event, Delta)])

    async def call() -> int:
        async with AsyncClient(address) as client:
            return sum(await asyncio.gather(*(stream(client, seed) for seed in range(batch))))

    return asyncio.run(call())
