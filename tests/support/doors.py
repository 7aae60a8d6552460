"""Doors for HTTP in front of services, in this process."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from door.server import serve
from door.settings import DoorConfig


@asynccontextmanager
async def opened(server: str, **settings: Any) -> AsyncGenerator[str, None]:
    """A door in front of the service at `server`; gives its URL."""
    loop = asyncio.get_running_loop()
    told, end = loop.create_future(), asyncio.Event()
    config = DoorConfig(server=server, port=0, **settings)
    serving = asyncio.create_task(serve(config, lambda url, _: told.set_result(url), end))
    try:
        await asyncio.wait([told, serving], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        yield await told
    finally:
        end.set()
        await asyncio.wait([serving])
