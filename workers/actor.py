"""A rank as an actor. The fleet gives this class to Ray; nothing here knows Ray."""

from longleaf.config import apply_environment, network_environment
from longleaf.network_interfaces import interface_of
from longleaf.rank_protocol.rank_spec import RankSpec
from workers.imports import for_good


class WorkerActor:
    """Holds one rank. Imports torch only once `run` is called, when the process's environment is complete."""

    def run(self, spec: RankSpec) -> int:
        """Lives the life of the rank; returns its exit code. The call is what the fleet watches."""
        apply_environment(network_environment(interface_of(spec.host)))
        with for_good():
            from workers.control import serve
            from workers.rank import Rank

        return serve(spec, Rank)
