"""Counts the calls of a process to Ray's core."""

from pathlib import Path
from typing import Any, cast

from longleaf.rank_protocol.rank_spec import RankSpec
from tests.support.fakes.workers import EchoActor, EchoRank
from workers.control import serve

COUNTED = ("submit_task", "submit_actor_task", "create_actor", "put_object", "get_objects")


class RayCalls:
    """Stands in front of Ray's core, through which all that leaves a process for Ray goes."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += name in COUNTED
        return getattr(self._core, name)


def count_calls() -> RayCalls:
    """From here on counts the calls of this process."""
    from ray._private.worker import global_worker

    worker: Any = global_worker
    worker.core_worker = RayCalls(worker.core_worker)
    return worker.core_worker


def stop_counting(calls: RayCalls) -> None:
    from ray._private.worker import global_worker

    worker: Any = global_worker
    worker.core_worker = calls._core


class CountingActor(EchoActor):
    """An EchoActor that writes to `folder` how many calls it made while it was a rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def run(self, spec: RankSpec) -> int:
        calls = count_calls()
        code = serve(spec, cast(Any, EchoRank))
        (self._folder / str(spec.member)).write_text(str(calls.num_calls))
        stop_counting(calls)
        return code
