"""Services with all options off and with production settings, and their CPU time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.durable.service import TimedService, free_port
from bench.harness.service import START_SECONDS
from longleaf.client.channels import Access
from longleaf.config import EngineConfig, embedded_model
from longleaf.credentials import CredentialEntry, digest_of, line_of, new_credential
from longleaf.launch import coordinator_command
from longleaf.service_settings import SecurityConfig, ServiceConfig, TelemetryConfig
from tests.support.authority import Authority

TENANTS = 20
"""Tenants in the credentials file; the client is the last one, so that its secret is compared with all."""
KV_BYTES = 256 << 20
"""Several services are up at once: none shall take the memory of this machine."""


class Secret:
    """A certificate and its key behind a link that moves, as Kubernetes changes a Secret: both at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._count = 0
        self.cert, self.key = folder / "now" / "tls.crt", folder / "now" / "tls.key"

    def write(self, pair: tuple[bytes, bytes]) -> None:
        """From the return on both files have these contents."""
        self._count += 1
        made = self._folder / str(self._count)
        made.mkdir()
        for file, data in zip((self.cert, self.key), pair, strict=True):
            (made / file.name).write_bytes(data)
        link = self._folder / "next"
        link.symlink_to(made.name)
        os.replace(link, self._folder / "now")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a service, and the credentials of its clients."""

    security: SecurityConfig
    telemetry: TelemetryConfig
    access: Access


def everything_off() -> Settings:
    """A service as it is when nothing is set."""
    return Settings(SecurityConfig(), TelemetryConfig(), Access(tls_ca="", tls_cert="", tls_key="", credential=""))


def production(authority: Authority, folder: Path, secret: Secret | None = None) -> Settings:
    """TLS, credentials, metrics, and JSON logs of every call. Files that `secret` does not contain are written to
    `folder`."""
    if secret is None:
        secret = Secret(folder / "tls")
        secret.write(authority.make())
    credentials = [new_credential() for _ in range(TENANTS)]
    entries = [
        CredentialEntry(tenant=f"tenant-{number}", role="user", digests=(digest_of(credential),))
        for number, credential in enumerate(credentials)
    ]
    file = folder / "credentials"
    file.write_text("".join(f"{line_of(entry)}\n" for entry in entries))
    return Settings(
        SecurityConfig(tls_cert=str(secret.cert), tls_key=str(secret.key), credentials=str(file)),
        TelemetryConfig(metrics_port=free_port(), log_format="json", log_level="info"),
        authority.access(credential=credentials[-1]),
    )


@dataclass(frozen=True, slots=True)
class Running:
    """A service that runs."""

    address: str
    settings: Settings
    process: psutil.Process
    """The coordinator's process, without its ranks."""

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the coordinator."""
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def running(settings: Settings, world_size: int) -> Iterator[Running]:
    """A service of the embedded model, as a user would start it; it ends with the block."""
    config = EngineConfig(model=str(embedded_model()), world_size=world_size, kv_bytes=KV_BYTES // world_size)
    command = coordinator_command(
        ServiceConfig(engine=config, port=0, launcher="local", security=settings.security, telemetry=settings.telemetry)
    )
    with TimedService(command) as service:
        yield Running(service.wait_ready(START_SECONDS), settings, psutil.Process(service.pid))
