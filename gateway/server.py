"""Lifecycle of a gateway: listens, and stops on a signal or with its parent process."""

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from gateway.app import make_app
from gateway.certificates import Certificate
from gateway.openai.responses.files import ResponseFiles
from gateway.openai.responses.store import ResponseStore
from gateway.protocol import protocol_options
from longleaf.client import Retries
from longleaf.client.channels import Access
from longleaf.client.proxy_client import ProxyClient
from longleaf.config import join_address
from longleaf.errors import StartError
from longleaf.service_settings import GatewayConfig

log = logging.getLogger("gateway")


def listen(host: str, port: int) -> socket.socket:
    """Raises StartError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise StartError(f"cannot listen on {join_address(host, port)}: {reason}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by accepted connections
    return listener


def client_for(config: GatewayConfig) -> ProxyClient:
    """Raises InvalidArgument."""
    access = Access(credential="", insecure=config.insecure)
    if config.tls_ca is not None:
        access["tls_ca"] = config.tls_ca
    if config.tls_ca == "" or config.server_tls_cert is not None:
        access["tls_cert"] = config.server_tls_cert or ""
        access["tls_key"] = config.server_tls_key or ""
    return ProxyClient(config.server, retries=Retries(limit=0), **access)


EXPIRY_SECONDS = 60.0
"""Interval at which expired responses are removed."""
LAST_SECONDS = 1.0
"""Time for sending the final error to answers that are cut off."""


class GatewayServer(uvicorn.Server):
    """Sets `ending` when the shutdown starts, whatever the cause."""

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.set()
        await super().shutdown(sockets)  # which asks the running requests to end, and does not wait for them
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                while not self.force_exit and (self.server_state.tasks or self.server_state.connections):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handles SIGHUP like the other signals."""
        with super().capture_signals():
            if threading.current_thread() is not threading.main_thread():  # others get no signals
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)


async def serve(
    config: GatewayConfig, announce: Callable[[str, str | None], None], end: asyncio.Event | None = None
) -> None:
    """Serves until a signal, or `end`. Calls `announce` with its URL and that of the metrics. Raises InvalidArgument
    and StartError."""
    certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
    with listen(config.host, config.port) as listener, stored_responses(config) as stored:
        ending = asyncio.Event()
        async with (
            client_for(config) as client,
            counted(make_app(client, config, ending, stored), config) as (app, metrics),
        ):
            uvicorn_config = uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                timeout_graceful_shutdown=math.ceil(config.drain_seconds),
                **protocol_options(config.max_connections, config.allow_origin),
            )
            uvicorn_config.load()
            uvicorn_config.ssl = certificate.context if certificate is not None else None
            server = GatewayServer(uvicorn_config, ending)
            tasks = [asyncio.create_task(certificate.reload_on_change())] if certificate is not None else []
            end = end or asyncio.Event()
            tasks.append(asyncio.create_task(_end_with(server, end)))
            tasks.append(asyncio.create_task(_remove_expired(stored)))
            if config.with_parent:
                _watch_parent(end)
            scheme = "https" if certificate is not None else "http"
            announce(f"{scheme}://{join_address(config.host, listener.getsockname()[1])}", metrics)
            try:
                await server.serve([listener])
            finally:
                for task in tasks:
                    task.cancel()


@contextmanager
def stored_responses(config: GatewayConfig) -> Generator[ResponseStore, None, None]:
    """The responses of /v1/responses, in files if there is a folder that no other gateway uses. Raises StartError."""
    files = None
    try:
        if config.responses_dir is not None:
            files = ResponseFiles(Path(config.responses_dir))
    except BlockingIOError:
        log.warning("another gateway uses %s: responses are stored in memory only", config.responses_dir)
    except OSError as error:
        raise StartError(f"cannot store responses in {config.responses_dir}: {error.strerror}") from error
    try:
        yield ResponseStore(config.responses_ttl, files=files)
    finally:
        if files is not None:
            files.close()


@asynccontextmanager
async def counted(app: ASGIApp, config: GatewayConfig) -> AsyncGenerator[tuple[ASGIApp, str | None]]:
    """The application, wrapped with metrics if enabled, and the URL of the metrics. Raises StartError."""
    if config.metrics_port is None:
        yield app, None
        return
    from gateway.metrics import GatewayMetrics

    metrics = GatewayMetrics(app)
    try:
        yield metrics, await metrics.start(config.metrics_host, config.metrics_port)
    finally:
        await metrics.stop()


async def _remove_expired(stored: ResponseStore) -> None:
    """Removes expired responses while no caller uses them."""
    while True:
        await asyncio.sleep(EXPIRY_SECONDS)
        stored.remove_expired()


async def _end_with(server: uvicorn.Server, end: asyncio.Event) -> None:
    await end.wait()
    server.should_exit = True


def _watch_parent(end: asyncio.Event) -> None:
    """Sets `end` when standard input ends."""
    loop, number = asyncio.get_running_loop(), sys.stdin.fileno()

    def look() -> None:
        with suppress(BlockingIOError):
            if not os.read(number, 1 << 10):
                loop.remove_reader(number)
                end.set()

    os.set_blocking(number, False)
    loop.add_reader(number, look)
