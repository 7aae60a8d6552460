"""A gRPC port that stays open after malformed calls.

The library permanently stops accepting calls when the path of a call is not UTF-8, which needs no credentials. Running
calls continue, and the port is freed: another server then takes it over.
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
"""Seconds between two checks that the server accepts calls. gRPC reports such a failure only after the last stream has
ended."""
log = logging.getLogger(__name__)


class Listener:
    """Listens with one server at a time, created by `make`; encrypted if there are certificates."""

    def __init__(self, make: Callable[[], grpc.aio.Server], certificates: Certificates | None = None) -> None:
        self._make = make
        self._certificates = certificates
        self._server: grpc.aio.Server | None = None
        self._previous: set[grpc.aio.Server] = set()
        """Servers that accept no more calls but still have streams."""
        self._supervising: asyncio.Task[None] | None = None
        self._is_stopped = asyncio.Event()

    async def start(self, host: str, port: int) -> int:
        """Returns the port; for 0 the system chooses it. Raises StartError if the address is not available."""
        bound = await self._listen(host, port)
        self._supervising = asyncio.create_task(self._keep(host, bound))
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
            raise StartError(f"cannot listen on {address}: port {port} is in use") from error
        self._server = server  # before the start: `stop` must find the server even while it starts
        await server.start()
        return bound

    async def _keep(self, host: str, port: int) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._server is None or not _takes_calls(self._server):
                await self._replace(host, port)

    async def _replace(self, host: str, port: int) -> None:
        if self._server is not None:
            log.warning("an invalid connection closed port %d; reopening it", port)
            self._previous.add(self._server)
            self._server = None
        self._previous = {server for server in self._previous if not await _is_over(server)}
        try:
            await self._listen(host, port)
        except StartError as error:  # another process took the port, and may release it later
            log.error("%s", error)

    async def wait(self) -> None:
        """Returns when the listener has stopped."""
        await self._is_stopped.wait()

    async def stop(self, grace: float | None = None) -> None:
        """Refuses new calls, gives running calls `grace` seconds, then cancels them. Idempotent."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait([self._supervising])
        servers = [*self._previous, *([self._server] if self._server is not None else [])]
        await asyncio.gather(*(_stop(server, grace) for server in servers))
        self._is_stopped.set()


def check_address(host: str, port: int) -> None:
    """Raises StartError with the reason if `host`:`port` is not available; gRPC only logs the reason."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise StartError(f"cannot listen on {join_address(host, port)}: {reason}") from error


def _takes_calls(server: grpc.aio.Server) -> bool:
    untyped: Any = server  # only the wrapped server has this state
    return untyped._server.is_running()


async def _is_over(server: grpc.aio.Server) -> bool:
    """Whether a server that accepts no calls has no streams left."""
    with suppress(UnicodeDecodeError):  # the error that stopped the server
        return await server.wait_for_termination(timeout=0)
    return True


async def _stop(server: grpc.aio.Server, grace: float | None) -> None:
    with suppress(UnicodeDecodeError):  # the error that stopped the server
        await server.stop(grace)
