"""Registry of kernel backends, and the choice for a rank."""

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from longleaf.config import KernelsChoice, KernelsName
from longleaf.errors import StartError
from longleaf.kernels.backend import Backend
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.kernels.cpu.flash import TorchFlashBackend
from longleaf.kernels.dense import DenseBackend
from longleaf.kernels.probe import probe

log = logging.getLogger(__name__)


class BackendEntry(NamedTuple):
    """A selectable backend."""

    make: Callable[[], Backend]
    """Raises OSError, ImportError or RuntimeError, with the reason, if the backend is unavailable."""
    device: str | None
    """Device type; None: any."""


def _flash() -> Backend:
    from longleaf.kernels.gpu.flash import FlashKernels  # Triton may be missing, and only these need it

    return FlashKernels.load()


def _triton() -> Backend:
    from longleaf.kernels.gpu.backend import TritonKernels

    return TritonKernels.load()


TABLE: dict[KernelsName, BackendEntry] = {
    "compiled": BackendEntry(NativeBackend, "cpu"),
    "torch": BackendEntry(TorchFlashBackend, "cpu"),
    "flash": BackendEntry(_flash, "cuda"),
    "triton": BackendEntry(_triton, "cuda"),
    "dense": BackendEntry(DenseBackend, None),
}
"""By name, the fastest first for each device."""


def choose(name: KernelsChoice, device: str, dtype: torch.dtype) -> Backend:
    """The backend of this name for ranks on a device (`cpu`, `cuda:0`) with keys and values of a type; `auto` selects
    the fastest available. Raises StartError, with the reason, if it is unavailable or computes wrong results."""
    backend = _fastest(device) if name == "auto" else _make(name, device)
    if wrong := probe(backend, device, dtype):
        raise StartError(f"kernels: {backend.name} is wrong on {device}: {wrong}; --kernels chooses others")
    log.info("kernels: %s", backend.name)
    return backend


def _make(name: KernelsName, device: str) -> Backend:
    entry = TABLE[name]
    if entry.device not in (None, torch.device(device).type):
        raise StartError(f"kernels: {name} runs on {entry.device}, but this rank is on {device}")
    try:
        return entry.make()
    except (OSError, ImportError, RuntimeError) as error:
        raise StartError(f"kernels: {name} is not available on {device}: {error}") from error


def _fastest(device: str) -> Backend:
    """The first available entry for this device; the reasons against earlier ones are logged."""
    names: list[KernelsName] = [
        name for name, entry in TABLE.items() if entry.device in (None, torch.device(device).type)
    ]
    for name, following in pairwise(names):
        try:
            return _make(name, device)
        except StartError as error:
            log.warning("%s; using %s instead (slower)", error, following)
    return _make(names[-1], device)
