"""The HTTP gateway as a child process of the service."""

import asyncio
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from longleaf.backoff import backoff_delay
from longleaf.errors import StartError
from longleaf.launch import gateway_command
from longleaf.service_settings import GatewayConfig, ServiceConfig

START_SECONDS = 60.0
STOP_SECONDS = 5.0
AGAIN_SECONDS = 1.0
"""Delay before a gateway that died is restarted. It doubles with each failure, up to LONGEST_SECONDS."""
LONGEST_SECONDS = 30.0
WELL_SECONDS = 60.0
"""A gateway that ran for this long resets the delay when it dies."""
RESPONSES = "responses"
"""Folder of the gateway's stored responses in the data folder."""
log = logging.getLogger(__name__)


class GatewayAnnouncement(msgspec.Struct, frozen=True):
    """First line of the gateway's output: its address once it listens, or the error that prevented the start."""

    http: str = ""
    error: str = ""


class GatewayProcess:
    """Starts the gateway, restarts it when it dies, and stops it. The gateway connects to the service through a socket
    in a private folder. It exits when the pipe to this process closes, so it never outlives this process."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="longleaf-")
        self.socket = str(Path(self._folder.name) / "service")
        """The socket on which the service must listen."""
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None
        self._supervising: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Starts the gateway and returns its address. Raises StartError."""
        self.url = await self._start(self._config.gateway.http or 0)
        self._supervising = asyncio.create_task(self._supervise())
        return self.url

    async def _start(self, port: int) -> str:
        """Raises StartError."""
        process = await asyncio.create_subprocess_exec(
            *self._command(port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal reaches only the service, which stops the gateway
        )
        self._process = process
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        except TimeoutError:
            line = b""
        message = (
            msgspec.json.decode(line, type=GatewayAnnouncement) if line else GatewayAnnouncement(error="no output")
        )
        if message.error:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise StartError(f"HTTP gateway: {message.error}")
        return message.http

    def _command(self, port: int) -> list[str]:
        config, security = self._config, self._config.security
        return gateway_command(
            GatewayConfig(
                server=f"unix:{self.socket}",
                tls_ca="",
                host=config.host,
                port=port,
                tls_cert=security.tls_cert,
                tls_key=security.tls_key,
                insecure=security.insecure,
                allow_host=config.gateway.allowed,
                allow_origin=config.gateway.allowed_origins,
                public_url=config.gateway.public_url,
                responses_ttl=config.gateway.responses_ttl,
                responses_dir=os.path.join(config.data.data_dir, RESPONSES) if config.data.data_dir else None,
                log_format=config.telemetry.log_format,
                log_level=config.telemetry.log_level,
                as_json=True,
                with_parent=True,
            )
        )

    async def _supervise(self) -> None:
        """Restarts the gateway on the same port when it dies."""
        num_failed, loop = 0, asyncio.get_running_loop()
        while True:
            assert self._process is not None
            began = loop.time()
            code = await self._process.wait()
            num_failed = 1 if loop.time() - began > WELL_SECONDS else num_failed + 1
            delay = backoff_delay(num_failed, AGAIN_SECONDS, LONGEST_SECONDS)
            log.warning("the HTTP gateway exited with code %d; restarting in %g s", code, delay)
            await asyncio.sleep(delay)
            with suppress(StartError, OSError):
                await self._start(int(self.url.rpartition(":")[2]))

    async def stop(self) -> None:
        """Stops the gateway."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait([self._supervising])
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        with suppress(FileNotFoundError):
            os.unlink(self.socket)
        self._folder.cleanup()
