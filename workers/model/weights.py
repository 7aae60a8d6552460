"""The weights of a checkpoint: accepted formats, memory while they are read, and their transfer to a device."""

import ctypes
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from longleaf.config import apply_environment, loading_environment
from longleaf.errors import ModelRefused

SAFE_WEIGHTS: dict[str, Any] = {"use_safetensors": True, "weights_only": True}
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`, see malloc.h."""
APART = 1 << 20
LARGEST = 32 << 20
"""The maximum to which glibc raises its dynamic threshold."""


def check_weights(folder: Path, config: PreTrainedConfig) -> None:
    """Refuses weights in pickles, which can execute code, even if only the config or an index names them."""
    first: str = getattr(config, "transformers_weights", None) or SAFE_WEIGHTS_INDEX_NAME
    names, index = [first], folder / first
    if first.endswith(".index.json"):
        names = _indexed(index) if index.is_file() else []
    for name in names:
        if not name.endswith(".safetensors"):
            raise ModelRefused(f"{folder} has weights in {name}: only safetensors is supported")


def _indexed(index: Path) -> list[str]:
    """The files that an index names. Raises ModelRefused if it lacks the fields that transformers reads."""
    found: Any = json.loads(index.read_text())
    entries: Any = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries.values()):
        raise ModelRefused(f"{index} has no weight_map")
    if not isinstance(found.get("metadata"), dict):
        raise ModelRefused(f"{index} has no metadata, which transformers requires")
    return list(entries.values())


@contextmanager
def large_blocks_apart() -> Generator[None]:
    """Allocates blocks larger than 1 MiB with mmap in the body, so that freeing them returns the memory to the system.

    By default, glibc raises the mmap threshold to the size of the largest freed block. Weights then share the heap with
    temporary blocks of the same size, and fragment it: an overhead of 50% was observed. After the body, blocks up to
    glibc's own maximum come from the heap, because steps allocate the same sizes repeatedly. Without glibc this does
    nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(MMAP_THRESHOLD, APART)
    try:
        yield
    finally:
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, 2 * LARGEST)


@contextmanager
def loading_to_device(device: str) -> Generator[None, None, None]:
    """Moves parameters to `device` as soon as they are assigned to a module: when weights are read one at a time, the
    host's memory holds at most one.

    Transformers supports this only with a package that is not needed otherwise. Buffers are small; they are created
    after the weights and are not moved. Models that other threads load at the same time would be moved as well.
    """

    there: dict[int, nn.Parameter] = {}

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # skips meta parameters, and subclasses whose move may have side effects
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        if id(parameter) in there:  # tied to another module: its identity must be preserved
            return None
        moved = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
        vars(moved).update(vars(parameter))  # transformers marks loaded parameters, and initializes the others
        there[id(moved)] = moved
        return moved

    if device == "cpu":
        yield
        return
    apply_environment(loading_environment())
    handle = register_module_parameter_registration_hook(move)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        handle.remove()
