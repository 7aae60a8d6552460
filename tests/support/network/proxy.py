"""A connection that breaks: a TCP proxy that drops its first connections after so many bytes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Forwards to `address`, from `delay` seconds after a connection was opened. Connection i is dropped, both ways at
    once, after `budgets[i]` bytes from the client."""

    def __init__(self, address: str, budgets: Sequence[int], delay: float) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._budgets = list(budgets)
        self._delay = delay
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_dropped = 0

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = self._budgets.pop(0) if self._budgets else None
        await asyncio.sleep(self._delay)
        upward_reader, upward = await asyncio.open_connection(self._host, self._port)
        down = asyncio.create_task(_forward(upward_reader, writer, None))
        try:
            with suppress(ConnectionError):
                self.num_dropped += await _forward(reader, upward, budget)
        finally:
            down.cancel()
            await asyncio.wait([down])
            for end in (writer, upward):
                end.transport.abort()

    def drop(self) -> None:
        """Breaks every connection that is open now."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int | None) -> bool:
    """Whether it ended because the budget was spent."""
    sent = 0
    while data := await reader.read(1 << 16):
        sent += len(data)
        if budget is not None and sent > budget:
            return True
        writer.write(data)
        await writer.drain()
    return False


@asynccontextmanager
async def breaking(address: str, *budgets: int, delay: float = 0.0) -> AsyncIterator[tuple[Proxy, str]]:
    """The proxy and its address."""
    proxy = Proxy(address, budgets, delay)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield proxy, f"{host}:{port}"
    finally:
        server.close()
        await proxy.close()
