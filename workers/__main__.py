"""A rank as a plain process, started by coordinator.cluster.local_fleet."""

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from longleaf.config import apply_environment, network_environment
from longleaf.logs import Facts, Logs
from longleaf.network_interfaces import interface_of
from longleaf.rank_protocol.group_messages import Join, Ready
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.service_settings import TelemetryConfig
from workers.control import serve
from workers.imports import frozen_imports
from workers.logs import LOGGERS
from workers.rank_runtime import RankRuntime

SILENT = TelemetryConfig()


class ProcessContext:
    """The node, rank and epoch for log lines. Rank and epoch are those of the last epoch that was joined."""

    def __init__(self, node: str) -> None:
        self._facts: Facts = {"node": node}

    def join(self, join: Join) -> None:
        """Records the rank and the number of the joined epoch."""
        self._facts = {**self._facts, "rank": join.rank, "epoch": join.epoch}

    def facts(self) -> Facts:
        """The facts to log. Thread-safe."""
        return self._facts


def main(spec: RankSpec, telemetry: TelemetryConfig = SILENT) -> None:
    """Entry point of a rank's process. A spawned process imports torch only here, after its environment is set."""
    apply_environment(network_environment(interface_of(spec.host)))
    place = ProcessContext(spec.node)
    if not telemetry.has_plain_log:
        Logs(telemetry, LOGGERS, place.facts)
    with frozen_imports():
        from workers.rank import Rank

    class PlacedRank(Rank):
        def join(self, join: Join) -> Ready:
            place.join(join)
            return super().join(join)

    live(spec, PlacedRank)


def make_orphan_check() -> Callable[[], bool]:
    """Returns a function that returns true once the coordinator or the parent process has ended. The parent may be a
    fork server.
    """
    coordinator, parent = multiprocessing.parent_process(), os.getppid()
    return lambda: os.getppid() != parent or (coordinator is not None and not coordinator.is_alive())


def live(spec: RankSpec, make_rank: Callable[[RankSpec], RankRuntime]) -> NoReturn:
    """Runs the member until it is stopped, and exits with its exit code. The process also ends when
    the coordinator or the fork server ends.
    """
    # Ctrl-C reaches the whole foreground process group, but only the coordinator stops ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = serve(spec, make_rank, make_orphan_check())
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the rank is closed; a regular interpreter exit with torch and a model takes seconds longer
