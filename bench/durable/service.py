"""A service over a data folder, as a user would start it: it may be killed with all its processes."""

import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

import psutil

from longleaf.config import LOOPBACK, DataConfig, EngineConfig
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.service_settings import ServiceConfig

Snapshots = Literal["seal", "off"]
KILL_SECONDS = 30.0
MAX_LOSSES = 1000
"""Per minute: none that is made here has the service wait."""


MODES: tuple[Snapshots, ...] = ("off", "seal")
"""Those that are held against each other."""


def command(
    model: Path,
    data_dir: Path,
    *,
    world_size: int,
    snapshots: Snapshots = "seal",
    kv_bytes: int | None = None,
    port: int = 0,
) -> list[str]:
    """The command line of the service."""
    config = EngineConfig(model=str(model), world_size=world_size, kv_bytes=kv_bytes, max_losses_per_minute=MAX_LOSSES)
    data = DataConfig(data_dir=str(data_dir), snapshots=snapshots)
    return coordinator_command(ServiceConfig(engine=config, port=port, launcher="local", data=data))


def free_port() -> int:
    """A port that is currently free."""
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return found.getsockname()[1]


class TimedService(ServiceProcess):
    """Knows when it was started."""

    def __enter__(self) -> Self:
        self.began = time.perf_counter()
        return super().__enter__()

    def kill(self) -> None:
        """All its processes at once, as a machine would end them, and waits until they are gone."""
        main = psutil.Process(self.pid)
        everybody = [main, *main.children(recursive=True)]
        for process in everybody:
            with suppress(psutil.NoSuchProcess):  # ranks may end as soon as their service has
                process.send_signal(signal.SIGKILL)
        self._process.wait(KILL_SECONDS)
        psutil.wait_procs(everybody, timeout=KILL_SECONDS)


def start_delay(pid: int, of: int) -> float:
    """Seconds from the start of process `of` to that of process `pid`, to a hundredth."""
    return psutil.Process(pid).create_time() - psutil.Process(of).create_time()
