"""The weights that each rank holds where `--weights auto` leaves the choice to the service."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from longleaf.config import DtypeName, EngineConfig
from longleaf.errors import ModelRefused
from longleaf.fingerprint import CONFIG, count_numbers
from longleaf.formatting import human_bytes
from longleaf.resources import gpu_memory, memory
from longleaf.runs import ceil_div
from longleaf.service_settings import ServiceConfig
from longleaf.topology import count_ranks

REMAINING = 0.1
"""Share of the memory of a rank that its weights must leave for keys, values and steps."""
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by the names of types in safetensors files."""
QUANTIZED_NUMBERS = {"U8": 2, "I32": 8}
"""Numbers of 4 bits in an element of packed types, by their names in safetensors files."""
DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

log = logging.getLogger(__name__)


class _Config(msgspec.Struct, frozen=True):
    dtype: str | None = None
    torch_dtype: str | None = None
    """The former name of `dtype`."""
    quantization_config: object = None


def choose_weights(
    weight_bytes: int, rank_memory: int | None, world_size: int, kv_bytes: int = 0
) -> Literal["whole", "sharded"]:
    """`whole` if the memory of each rank has room for all weights and for `kv_bytes` of keys and values, in bytes. The
    choice is `whole` as well if there are 0 bytes of weights, or if the memory is unknown (None).
    """
    if world_size == 1 or not weight_bytes or rank_memory is None:
        return "whole"
    return "whole" if weight_bytes + kv_bytes <= (1 - REMAINING) * rank_memory else "sharded"


def with_weights(config: ServiceConfig, num_gpus: int, notify: Callable[[str], None]) -> ServiceConfig:
    """The settings with `whole` or `sharded` instead of `auto`. The model is a local folder. `num_gpus`: the GPUs of
    this machine. `notify` receives a message if the weights are sharded.

    On an existing Ray cluster `auto` remains: the service chooses when it knows the nodes of its ranks.
    """
    engine = config.engine
    if engine.weights != "auto" or (config.ray_address is not None and engine.world_size > 1):
        return config
    chosen, message = with_chosen_weights(engine, memory_of_rank(engine, num_gpus))
    if message:
        notify(message)
    return msgspec.structs.replace(config, engine=chosen)


def with_chosen_weights(engine: EngineConfig, rank_memory: int | None) -> tuple[EngineConfig, str]:
    """The settings with `whole` or `sharded` instead of `auto`, and the reason for sharded weights, empty for whole
    ones. `rank_memory`: bytes of the memory of each rank, None if it is unknown.

    Raises InvalidArgument for settings that are invalid with sharded weights.
    """
    weight_bytes = 0 if engine.world_size == 1 else whole_bytes(Path(engine.model), engine.dtype)
    weights = choose_weights(weight_bytes, rank_memory, engine.world_size, engine.kv_bytes or 0)
    chosen = msgspec.structs.replace(engine, weights=weights)
    chosen.check()
    if weights == "whole" or rank_memory is None:
        return chosen, ""
    return chosen, describe_choice(weight_bytes, rank_memory, engine.world_size)


def describe_choice(weight_bytes: int, rank_memory: int, world_size: int) -> str:
    """The reason for sharded weights, and the bytes on each rank."""
    share = human_bytes(weight_bytes / world_size)
    whole, there = human_bytes(weight_bytes), human_bytes(rank_memory)
    ranks = count_ranks(world_size)
    return f"weights: sharded, about {share} on each of {ranks}: all {whole} do not fit into the {there} of a rank"


def memory_of_rank(engine: EngineConfig, num_gpus: int) -> int | None:
    """Bytes of the memory of a rank on this machine: its part of the smallest GPU, or of the memory that is available
    to this process. None if it is unknown.
    """
    if num_gpus and engine.device != "cpu":
        sizes = gpu_memory()
        return min(sizes) // ceil_div(engine.world_size, num_gpus) if sizes else None
    return memory().free // engine.world_size


def whole_bytes(folder: Path, dtype: DtypeName) -> int:
    """Bytes of all weights of a checkpoint in `dtype`, from the headers of its files; 0 if they are unknown. Packed
    numbers are counted as if they had 4 bits. Ranks report files that cannot be read.
    """
    try:
        counts = count_numbers(folder)
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config)
    except (ModelRefused, OSError, ValueError, msgspec.MsgspecError) as error:
        log.debug("weights of unknown size: %s", error)
        return 0
    named = (config.dtype or config.torch_dtype or "auto") if dtype == "auto" else dtype
    if config.quantization_config:
        numbers = sum(count * QUANTIZED_NUMBERS.get(stored, 1) for stored, count in counts.items())
        stated: int | None = DTYPE_BYTES.get(named)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return numbers * (stated or ITEM_BYTES["BF16"])
    if not set(counts) <= set(ITEM_BYTES):
        return 0
    size: int | None = DTYPE_BYTES.get(named)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return sum(count * (size or ITEM_BYTES[stored]) for stored, count in counts.items())
