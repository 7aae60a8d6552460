"""Settings of a service."""

import os
from pathlib import Path

import msgspec

from longleaf.config import (
    DRAIN_SECONDS,
    LOOPBACK,
    DataConfig,
    EngineConfig,
    Launcher,
    SamplingDefaults,
    check_model_name,
    check_waits,
)
from longleaf.errors import InvalidArgument
from longleaf.service_settings import HttpConfig, SecurityConfig, TelemetryConfig


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model to serve and the address to listen on."""

    engine: EngineConfig
    host: str = LOOPBACK
    port: int = 0
    """0 lets the system choose."""
    launcher: Launcher = "ray"
    model_name: str | None = None
    """Name of the model as clients see it; None: the name of its folder."""
    sampling_defaults: SamplingDefaults = "greedy"
    """Sampling parameters for requests that omit them."""
    ray_address: str | None = None
    """A Ray cluster to join; None starts one."""
    wait_for_ranks: float = 0.0
    """Seconds to wait for slots that the cluster does not have yet."""
    drain_seconds: float = DRAIN_SECONDS
    """Seconds that running calls get to finish after a shutdown request."""
    data: DataConfig = DataConfig()
    """Settings of persistence."""
    security: SecurityConfig = SecurityConfig()
    """Settings of authentication and encryption."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Settings of logs, metrics and traces."""
    gateway: HttpConfig = HttpConfig()
    """Settings of the HTTP gateway."""
    as_json: bool = False
    """Print the address, and the components still missing, as JSON objects instead of text."""

    @property
    def shown_name(self) -> str:
        """Name of the model as clients see it."""
        folder = Path(self.engine.model).resolve().name
        return self.model_name or os.fsencode(folder).decode(errors="replace")  # it may be any bytes

    def check(self) -> None:
        """Raises InvalidArgument naming the first setting that is out of range."""
        self.engine.check()
        check_waits(self.wait_for_ranks, self.drain_seconds)
        self.data.check(self.engine.snapshot_url)
        self.security.check(self.host)
        self.telemetry.check()
        self.gateway.check(self.security)
        if self.engine.share_prefixes and self.security.credentials is None:
            raise InvalidArgument("share_prefixes", "requires credentials: without them there are no tenants")
        if self.model_name is not None:
            check_model_name(self.model_name)
