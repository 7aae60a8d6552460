"""The launcher, the number of ranks and the threads of each, where the user leaves them to `longleaf serve`."""

import os
from typing import NamedTuple

from msgspec.structs import replace

from longleaf.config import CHOSEN
from longleaf.resources import num_gpus, num_processors
from longleaf.service_settings import ServiceConfig


class Machine(NamedTuple):
    """Properties of a machine that determine the choice."""

    num_processors: int
    num_gpus: int
    omp_threads: int | None = None
    """Value of OMP_NUM_THREADS, the usual limit of the threads of a process."""


def this_machine() -> Machine:
    """Counts the processors and GPUs that this process may use."""
    return Machine(num_processors(), num_gpus(), _omp_threads())


def choose_ranks(config: ServiceConfig, machine: Machine) -> ServiceConfig:
    """The same settings with a launcher, a number of ranks and a number of threads, each chosen where it is not given.

    One rank with many threads holds the weights once and reads them once per token; many ranks with one thread each
    would hold and read as many copies. So only GPUs, which cannot share a rank, make more than one
    (docs/adr/0027-one-rank-many-threads.md). A rank of an existing Ray cluster gets one thread, as it reserves one CPU.
    """
    needs_ray = config.ray_address is not None or config.wait_for_ranks > 0
    launcher = config.launcher
    if launcher == "auto":
        launcher = "ray" if needs_ray else "local"
    engine, is_here = config.engine, config.ray_address is None
    num_devices = machine.num_gpus if is_here and engine.device != "cpu" else 0
    world_size, threads = engine.world_size, engine.threads_per_rank
    if world_size == CHOSEN:
        world_size = max(1, num_devices)
    if threads == CHOSEN:
        threads = 1 if num_devices or not is_here else machine.num_processors // world_size
        threads = machine.omp_threads or max(1, threads)
    return replace(config, launcher=launcher, engine=replace(engine, world_size=world_size, threads_per_rank=threads))


def _omp_threads() -> int | None:
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) > 0 else None
