"""Gateways for HTTP in front of services, in this process."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from gateway.server import serve
from longleaf.service_settings import GatewayConfig
from tests.support.service import FakeEngine, serving

T = TypeVar("T")


@asynccontextmanager
async def opened(server: str, **settings: Any) -> AsyncGenerator[str, None]:
    """A gateway in front of the service at `server`; gives its URL."""
    loop = asyncio.get_running_loop()
    reported, end = loop.create_future(), asyncio.Event()
    config = GatewayConfig(server=server, port=0, **settings)
    serving = asyncio.create_task(serve(config, lambda url, _: reported.set_result(url), end))
    try:
        await asyncio.wait([reported, serving], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        yield await reported
    finally:
        end.set()
        await asyncio.wait([serving])


class SharedService:
    """A service on a fake engine, a gateway in front of it, and a client of the gateway, shared by many examples.
    Nothing runs between the examples."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: FakeEngine, client: httpx2.AsyncClient) -> None:
        self._loop, self.engine, self.client = loop, engine, client

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


@contextmanager
def shared_service(folder: Path) -> Generator[SharedService, None, None]:
    loop, engine = asyncio.new_event_loop(), FakeEngine()

    @asynccontextmanager
    async def entered() -> AsyncGenerator[httpx2.AsyncClient, None]:
        async with (
            serving(engine, folder) as (_, address),
            opened(address) as url,
            httpx2.AsyncClient(base_url=url, timeout=60) as client,
        ):
            yield client

    it = entered()
    try:
        yield SharedService(loop, engine, loop.run_until_complete(it.__aenter__()))
        loop.run_until_complete(it.__aexit__(None, None, None))
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
