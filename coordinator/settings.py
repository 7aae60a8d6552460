"""What a service is told when it starts."""

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
    """What to serve and where to listen."""

    engine: EngineConfig
    host: str = LOOPBACK
    port: int = 0
    """0 lets the system choose."""
    launcher: Launcher = "ray"
    model_name: str | None = None
    """What clients see of the model; None: the name of its folder."""
    sampling_defaults: SamplingDefaults = "greedy"
    """Sampling parameters of requests that leave them out."""
    ray_address: str | None = None
    """A Ray cluster to join; None starts one."""
    wait_for_ranks: float = 0.0
    """Seconds to wait for slots that the cluster does not have yet."""
    drain_seconds: float = DRAIN_SECONDS
    """Seconds that running calls may take to end once the service is told to."""
    data: DataConfig = DataConfig()
    """What outlives the service."""
    security: SecurityConfig = SecurityConfig()
    """Who may come in."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What it tells of itself."""
    door: HttpConfig = HttpConfig()
    """Whether and how it is reached over HTTP, too."""
    as_json: bool = False
    """Tell the address, and what is waited for, as JSON objects instead of lines for people."""

    @property
    def shown_name(self) -> str:
        """What clients see of the model."""
        folder = Path(self.engine.model).resolve().name
        return self.model_name or os.fsencode(folder).decode(errors="replace")  # it may be any bytes

    def check(self) -> None:
        """Raises InvalidArgument naming the first setting that is out of range."""
        self.engine.check()
        check_waits(self.wait_for_ranks, self.drain_seconds)
        self.data.check(self.engine.snapshot_url)
        self.security.check(self.host)
        self.telemetry.check()
        self.door.check(self.security)
        if self.engine.share_prefixes and self.security.credentials is None:
            raise InvalidArgument("share_prefixes", "needs credentials: without tenants there is nobody to share with")
        if self.model_name is not None:
            check_model_name(self.model_name)
