"""The weights that each rank holds where `--weights auto` or `--weights-dtype auto` leaves this to the service."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from longleaf.config import DtypeName, EngineConfig, WeightsChoice, WeightsDtype
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
EXPERTS = ".experts."
"""Part of the names of experts, which are always dequantized."""
QUANTIZED_BYTES = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "I32": 4}
"""Bytes of an element of quantized types."""
DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

log = logging.getLogger(__name__)


class _Config(msgspec.Struct, frozen=True):
    dtype: str | None = None
    torch_dtype: str | None = None
    """The former name of `dtype`."""
    quantization_config: object = None


class WeightsInMemory(msgspec.Struct, frozen=True):
    """The weights of each rank, without choices that are left open."""

    weights: Literal["whole", "sharded"]
    weights_dtype: Literal["stored", "dequantized"]


class WeightSizes(msgspec.Struct, frozen=True):
    """Bytes of all weights of a checkpoint; 0 if they are unknown."""

    dequantized: int
    stored: int = 0
    """With quantized weights as they are stored; 0 if there are none, or the ranks do not support them."""


def choose_weights(
    weights: WeightsChoice,
    weights_dtype: WeightsDtype,
    sizes: WeightSizes,
    rank_memory: int | None,
    world_size: int,
    kv_bytes: int = 0,
) -> WeightsInMemory:
    """The first of whole dequantized, whole stored, sharded dequantized and sharded stored weights that `weights` and
    `weights_dtype` allow, and for which the memory of each rank has room beside `kv_bytes` bytes of keys and values.
    The last allowed one if none fits; the first if the memory is unknown (None).
    """
    ways: tuple[Literal["whole", "sharded"], ...] = ("whole", "sharded") if world_size > 1 else ("whole",)
    types: tuple[Literal["stored", "dequantized"], ...] = (
        ("dequantized", "stored") if sizes.stored else ("dequantized",)
    )
    ways = (weights,) if weights != "auto" else ways
    types = (weights_dtype,) if weights_dtype != "auto" else types
    allowed = [WeightsInMemory(way, kind) for way in ways for kind in types]
    if rank_memory is None or not sizes.dequantized:
        return allowed[0]
    room = (1 - REMAINING) * rank_memory - kv_bytes
    return next((chosen for chosen in allowed if bytes_of_rank(chosen, sizes, world_size) <= room), allowed[-1])


def bytes_of_rank(chosen: WeightsInMemory, sizes: WeightSizes, world_size: int) -> float:
    """About the bytes of the weights on each rank."""
    size = sizes.stored if chosen.weights_dtype == "stored" else sizes.dequantized
    return size / world_size if chosen.weights == "sharded" else size


def with_weights(config: ServiceConfig, num_gpus: int, notify: Callable[[str], None]) -> ServiceConfig:
    """The settings with `whole` or `sharded`, and `stored` or `dequantized`, instead of `auto`. The model is a local
    folder. `num_gpus`: the GPUs of this machine. `notify` receives a message unless all weights are whole and
    dequantized.

    On an existing Ray cluster `auto` remains: the service chooses when it knows the nodes of its ranks.
    """
    engine = config.engine
    if not has_choice(engine) or (config.ray_address is not None and engine.world_size > 1):
        return config
    is_on_gpus = bool(num_gpus) and engine.device != "cpu"
    chosen, message = with_chosen_weights(engine, memory_of_rank(engine, num_gpus), is_on_gpus=is_on_gpus)
    if message:
        notify(message)
    return msgspec.structs.replace(config, engine=chosen)


def has_choice(engine: EngineConfig) -> bool:
    """Whether the settings leave a choice of the weights open."""
    return "auto" in (engine.weights, engine.weights_dtype)


def with_chosen_weights(
    engine: EngineConfig, rank_memory: int | None, *, is_on_gpus: bool = False
) -> tuple[EngineConfig, str]:
    """The settings with `whole` or `sharded`, and `stored` or `dequantized`, instead of `auto`, and the reason for a
    choice other than whole dequantized weights, or an empty string. `rank_memory`: bytes of the memory of each rank,
    None if it is unknown. GPUs do not support stored weights.

    Raises InvalidArgument for settings that are invalid with sharded weights.
    """
    sizes = sizes_of(Path(engine.model), engine.dtype)
    sizes = msgspec.structs.replace(sizes, stored=0) if is_on_gpus else sizes
    given = engine.weights, engine.weights_dtype
    weights = choose_weights(*given, sizes, rank_memory, engine.world_size, engine.kv_bytes or 0)
    chosen = msgspec.structs.replace(engine, weights=weights.weights, weights_dtype=weights.weights_dtype)
    chosen.check()
    is_sharded = engine.weights == "auto" and weights.weights == "sharded"
    is_stored = engine.weights_dtype == "auto" and weights.weights_dtype == "stored"
    if rank_memory is None or not (is_sharded or is_stored):
        return chosen, ""
    return chosen, describe_choice(weights, sizes, rank_memory, engine.world_size)


def describe_choice(chosen: WeightsInMemory, sizes: WeightSizes, rank_memory: int, world_size: int) -> str:
    """The reason for sharded or stored weights, and the bytes on each rank."""
    size = human_bytes(bytes_of_rank(chosen, sizes, world_size))
    kinds = ["sharded"] if chosen.weights == "sharded" else []
    kinds += ["kept as stored"] if chosen.weights_dtype == "stored" else []
    where = f"on each of {count_ranks(world_size)}" if world_size > 1 else "in memory"
    whole, there = human_bytes(sizes.dequantized), human_bytes(rank_memory)
    dequantized = " dequantized" if chosen.weights_dtype == "stored" else ""
    reason = f"all {whole}{dequantized} do not fit into the {there} of a rank"
    return f"weights: {' and '.join(kinds)}, about {size} {where}: {reason}"


def memory_of_rank(engine: EngineConfig, num_gpus: int) -> int | None:
    """Bytes of the memory of a rank on this machine: its part of the smallest GPU, or of the memory that is available
    to this process. None if it is unknown.
    """
    if num_gpus and engine.device != "cpu":
        sizes = gpu_memory()
        return min(sizes) // ceil_div(engine.world_size, num_gpus) if sizes else None
    return memory().free // engine.world_size


def sizes_of(folder: Path, dtype: DtypeName) -> WeightSizes:
    """Bytes of all weights of a checkpoint, in `dtype` and as they are stored, from the headers of its files. Packed
    numbers are counted as if they had 4 bits. Ranks report files that cannot be read.
    """
    try:
        counts, experts = count_numbers(folder), count_numbers(folder, EXPERTS)
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config)
    except (ModelRefused, OSError, ValueError, msgspec.MsgspecError) as error:
        log.debug("weights of unknown size: %s", error)
        return WeightSizes(0)
    named = (config.dtype or config.torch_dtype or "auto") if dtype == "auto" else dtype
    stated: int | None = DTYPE_BYTES.get(named)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if config.quantization_config:
        size = stated or ITEM_BYTES["BF16"]
        dequantized, more = (
            sum(count * QUANTIZED_NUMBERS.get(stored, 1) * size for stored, count in some.items())
            for some in (counts, experts)
        )
        others = {stored: count - experts.get(stored, 0) for stored, count in counts.items()}
        stored = more + sum(count * QUANTIZED_BYTES.get(stored, size) for stored, count in others.items())
        return WeightSizes(dequantized, stored)
    if not set(counts) <= set(ITEM_BYTES):
        return WeightSizes(0)
    return WeightSizes(sum(count * (stated or ITEM_BYTES[stored]) for stored, count in counts.items()))
