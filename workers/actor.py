"""A rank as an actor. The fleet passes this class to Ray; this module does not depend on Ray."""

from longleaf.config import apply_environment, network_environment
from longleaf.network_interfaces import interface_of
from longleaf.rank_protocol.rank_spec import RankSpec
from workers.imports import frozen_imports


class WorkerActor:
    """Runs one rank. Imports torch only in `run`, after the environment of the process is set."""

    def run(self, spec: RankSpec) -> int:
        """Runs the rank and returns its exit code. The fleet monitors this call."""
        apply_environment(network_environment(interface_of(spec.host)))
        with frozen_imports():
            from workers.control import serve
            from workers.rank import Rank

        return serve(spec, Rank)
