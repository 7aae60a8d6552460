"""The weights of a checkpoint: in which form they are read, and how they come to where they are used."""

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


def check_weights(folder: Path, config: PreTrainedConfig) -> None:
    """Refuses weights in pickles, which are programs, also where only the config or an index names them."""
    first: str = getattr(config, "transformers_weights", None) or SAFE_WEIGHTS_INDEX_NAME
    names, index = [first], folder / first
    if first.endswith(".index.json"):
        names = _indexed(index) if index.is_file() else []
    for name in names:
        if not name.endswith(".safetensors"):
            raise ModelRefused(f"{folder} has weights in {name}, which is not in safetensors, the only form read")


def _indexed(index: Path) -> list[str]:
    """The files that an index names. Raises ModelRefused where it has not what transformers reads of it."""
    found: Any = json.loads(index.read_text())
    entries: Any = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries.values()):
        raise ModelRefused(f"{index} has no weight_map, the files of its weights by name")
    if not isinstance(found.get("metadata"), dict):
        raise ModelRefused(f"{index} has no metadata, which transformers requires")
    return list(entries.values())


@contextmanager
def going_to(device: str) -> Generator[None, None, None]:
    """Has parameters move to `device` as soon as a module is given them: of weights that are read one after the other
    no more than one lies in the host's memory.

    Transformers does so by itself only with the help of a package that nothing else here needs. Buffers are made once
    all weights are there; they are small, and stay. Models that other threads load meanwhile would go there, too.
    """

    there: dict[int, nn.Parameter] = {}

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # without numbers yet, or of a kind of its own, which may do more when it moves than to move
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        if id(parameter) in there:  # tied to another module: it must stay the same
            return None
        moved = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
        vars(moved).update(vars(parameter))  # transformers marks what it has loaded, and fills in the rest
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
