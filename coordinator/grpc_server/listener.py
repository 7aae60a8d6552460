"""A port of gRPC that stays open whatever is sent to it.

The library stops to take calls, for good, when the path of one is no UTF-8, which needs no credentials. What runs goes
on, and the port is free: so another server takes its place.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from coordinator.grpc_server.certificates import Certificates
from longleaf.config import join_address
from longleaf.errors import StartError

LOOK_SECONDS = 0.1
"""How often is looked whether calls are taken: the library tells of it only when the last stream has ended."""
log = logging.getLogger(__name__)


class Listener:
    """Listens with servers that `make` makes, one at a time; encrypted, if there are certificates."""

    def __init__(self, make: Callable[[], grpc.aio.Server], certificates: Certificates | None = None) -> None:
        self._make = make
        self._certificates = certificates
        self._server: grpc.aio.Server | None = None
        self._earlier: set[grpc.aio.Server] = set()
        """Servers that take no calls any more, and whose streams go on."""
        self._keeping: asyncio.Task[None] | None = None
        self._is_stopped = asyncio.Event()

    async def start(self, host: str, port: int) -> int:
        """The port, chosen by the system for 0. Raises StartError when the address cannot be had."""
        bound = await self._listen(host, port)
        self._keeping = asyncio.create_task(self._keep(host, bound))
        return bound

    async def _listen(self, host: str, port: int) -> int:
        check_address(host, port)
        address, server = join_address(host, port), self._make()
        try:
            if self._certificates is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, self._certificates.credentials())
        except RuntimeError as error:
            raise StartError(f"cannot listen on {address}: port {port} was taken just now") from error
        self._server = server  # before it has started: whoever stops this meanwhile must find it
        await server.start()
        return bound

    async def _keep(self, host: str, port: int) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._server is None or not _takes_calls(self._server):
                await self._replace(host, port)

    async def _replace(self, host: str, port: int) -> None:
        if self._server is not None:
            log.warning("a call that was no call closed port %d; it is opened again", port)
            self._earlier.add(self._server)
            self._server = None
        self._earlier = {server for server in self._earlier if not await _is_over(server)}
        try:
            await self._listen(host, port)
        except StartError as error:  # somebody else was quicker, and may leave again
            log.error("%s", error)

    async def wait(self) -> None:
        """Waits until it was stopped."""
        await self._is_stopped.wait()

    async def stop(self, grace: float | None = None) -> None:
        """Takes no new calls, gives those that run `grace` seconds, then cancels them. Idempotent."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        servers = [*self._earlier, *([self._server] if self._server is not None else [])]
        await asyncio.gather(*(_stop(server, grace) for server in servers))
        self._is_stopped.set()


def check_address(host: str, port: int) -> None:
    """Raises StartError with the reason when nobody could listen on `host`:`port`; gRPC only writes it to the log."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise StartError(f"cannot listen on {join_address(host, port)}: {reason}") from error


def _takes_calls(server: grpc.aio.Server) -> bool:
    untyped: Any = server  # what it wraps alone can tell
    return untyped._server.is_running()


async def _is_over(server: grpc.aio.Server) -> bool:
    """Whether a server that takes no calls has no streams either."""
    with suppress(UnicodeDecodeError):  # what it stopped for
        return await server.wait_for_termination(timeout=0)
    return True


async def _stop(server: grpc.aio.Server, grace: float | None) -> None:
    with suppress(UnicodeDecodeError):  # what it stopped for
        await server.stop(grace)
