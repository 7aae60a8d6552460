"""A rank as an actor. The fleet gives this class to Ray; nothing here knows Ray."""

import os
import socket

from longleaf.step import RankSpec


class WorkerActor:
    """Holds one rank. Imports torch only once `run` is called, when the process's environment is complete."""

    def node(self) -> tuple[str, int]:
        """Host name and process id."""
        return socket.gethostname(), os.getpid()

    def run(self, spec: RankSpec) -> int:
        """Lives the life of the rank; returns its exit code. The call is what the fleet watches."""
        from workers.control import serve
        from workers.rank import Rank

        return serve(spec, Rank)
