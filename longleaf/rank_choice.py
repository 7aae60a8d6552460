"""The launcher, the number of ranks and the threads of each, where the user leaves them to `longleaf serve`."""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from longleaf.config import CHOSEN, MAX_THREADS
from longleaf.resources import num_gpus, num_processors
from longleaf.service_settings import ServiceConfig


class Machine(NamedTuple):
    """Properties of a machine that determine the choice."""

    num_processors: int
    num_gpus: int
    omp_threads: int | None = None
    """Value of OMP_NUM_THREADS, the usual limit of the threads of a process, hence of a rank."""


def this_machine() -> Machine:
    """Counts the processors and GPUs that this process may use."""
    return Machine(num_processors(), num_gpus() if _torch_supports_gpus() else 0, _omp_threads())


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
        is_alone = is_here and not num_devices  # else processors do little, or are shared with other programs
        share = machine.omp_threads or machine.num_processors // world_size
        threads = min(max(1, share), MAX_THREADS) if is_alone else 1
    return replace(config, launcher=launcher, engine=replace(engine, world_size=world_size, threads_per_rank=threads))


def _torch_supports_gpus() -> bool:
    """Whether torch was built for NVIDIA or AMD GPUs. Read from its files, because its import takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    facts = Path(spec.origin).with_name("version.py").read_text()
    return any(re.search(rf"^{kind}\b.*= (?!None)", facts, re.MULTILINE) for kind in ("cuda", "hip"))


def _omp_threads() -> int | None:
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) > 0 else None
