"""A rank as a plain process, started by coordinator.ranks.local_fleet."""

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from longleaf.channel.rank_spec import RankSpec
from longleaf.config import apply_environment, network_environment
from longleaf.interfaces import interface_of
from workers.control import serve
from workers.imports import for_good
from workers.ports import Computation


def main(spec: RankSpec) -> None:
    """Entry of a rank's process. Imports torch only here, when the process's environment is complete."""
    apply_environment(network_environment(interface_of(spec.host)))
    with for_good():
        from workers.rank import Rank

    live(spec, Rank)


def live(spec: RankSpec, make_rank: Callable[[RankSpec], Computation]) -> NoReturn:
    """Serves until told to leave, and exits with the rank's code. Dies with the process that started it."""
    # Ctrl-C reaches the whole foreground group; the coordinator alone decides when ranks leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    code = serve(spec, make_rank, parent.pid if parent else None)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the rank is closed: to take an interpreter with torch and a model apart takes seconds more
