"""Fork server of the local launcher: multiprocessing's own, with torch and transformers imported."""

import logging
import os
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any, Literal

from longleaf.config import EngineConfig, apply_environment, rank_environment
from longleaf.resources import has_gpu_driver

StartMethod = Literal["forkserver", "spawn"]
SERVER_DIED = 255
"""Exit code that multiprocessing reports for a process whose fork server has ended."""
log = logging.getLogger(__name__)


@contextmanager
def ignoring_terminals() -> Generator[None, None, None]:
    """A process started in this context never receives Ctrl-C or hang-up signals of a terminal, not even while it
    imports. Otherwise ranks could end before the coordinator ends them."""
    resource_tracker.ensure_running()  # starting it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(config: EngineConfig, preload: Sequence[str]) -> StartMethod:
    """Starts the fork server, which imports the modules `preload` once for all ranks and replacements, in the
    environment of the ranks. Call it before this process has threads that read the environment.

    Returns the start method of ranks: spawn where the server cannot be started, and where ranks may use a GPU, because
    an import may initialize its driver, which a forked process cannot use.
    """
    if config.device == "cuda" or (config.device == "auto" and has_gpu_driver()):
        return "spawn"
    variables, before = rank_environment(config.threads_per_rank), dict(os.environ)
    forkserver.set_forkserver_preload(list(preload))
    apply_environment(variables)
    try:
        with ignoring_terminals():
            forkserver.ensure_running()
    except OSError as error:  # no folder for temporary files, or its path is too long for a socket
        log.warning("ranks will start more slowly: cannot start the fork server: %s", error)
        return "spawn"
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update(before)
    return "forkserver"


def kill() -> None:
    """Ends the fork server at once, even if it is stopped or importing; the ranks that it forked end with it."""
    server: Any = getattr(forkserver, "_forkserver")  # noqa: B009  # private to multiprocessing
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
