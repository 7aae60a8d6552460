"""Entry point of a rank process with fault injection. Imports no torch before its environment is complete."""

from functools import partial
from pathlib import Path

from longleaf.config import apply_environment, network_environment
from longleaf.network_interfaces import interface_of
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.service_settings import TelemetryConfig
from workers.__main__ import live
from workers.imports import frozen_imports


def run_rank(folder: Path, spec: RankSpec, telemetry: TelemetryConfig) -> None:
    """Runs workers.__main__.main with a probe in `folder`, logging with default settings."""
    assert telemetry.has_plain_log
    apply_environment(network_environment(interface_of(spec.host)))
    with frozen_imports():
        from tests.chaos.member import ChaosRank

    live(spec, partial(ChaosRank, folder))
