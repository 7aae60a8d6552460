"""Divides the KV cache bytes of a rank, and allocates its pool."""

import logging

import msgspec
import torch

from longleaf import resources
from longleaf.config import EngineConfig
from longleaf.errors import StartError
from longleaf.formatting import human_bytes
from longleaf.positions import STATE_SPAN, UNLIMITED_TOKENS, WindowSpec
from longleaf.runs import ceil_div
from longleaf.topology import count_ranks
from workers.kv_cache.quantized import QuantizedPool
from workers.kv_cache.slots import FloatKvPool
from workers.kv_cache.states import StatePool
from workers.kv_cache.workspace_estimate import workspace
from workers.model import model as models
from workers.model.model import LayerSpec

log = logging.getLogger("longleaf.pools")  # messages logged while a rank starts are shown to users

FREE_MEMORY_SHARE = 0.4
"""Default share of a machine's free memory that its ranks use for keys and values."""
STATES_PER_SEQUENCE = 5
"""Default number of recurrent states per sequence that may run: two for its prompt, two for its answer, and one at the
end of a context.
"""
CONTEXT = 1 << 29
"""Bytes of a GPU that CUDA takes for each process, which torch does not count: some hundred MiB, at the upper end."""


def windowed_layers(model: models.Model, config: EngineConfig) -> dict[int, LayerSpec]:
    """Layers whose keys are replicated on every rank."""
    if config.window_keys == "sharded" or model.mixers is not None:
        return {}
    return {i: spec for i, spec in model.layers.items() if not spec.reach.is_full}


def sharded_layers(model: models.Model, config: EngineConfig) -> dict[int, LayerSpec]:
    """Layers each of whose keys is on one rank."""
    windowed = windowed_layers(model, config)
    return {i: spec for i, spec in model.layers.items() if i not in windowed}


def make_pool(
    model: models.Model, config: EngineConfig, num_ranks_here: int, ranks_per_gpu: int = 1
) -> tuple[FloatKvPool | QuantizedPool, WindowSpec | None]:
    """Allocates a pool of as many blocks as fit. Returns it with the window specification if windowed layers have
    separate blocks. Without a configured size, the ranks of this machine, or of this GPU, share the free memory. Raises
    StartError when no block, or no window, fits, and ModelRefused when the keys cannot be kept in the requested dtype.
    """
    kv_bytes = config.kv_bytes or default_kv_bytes(model, config, num_ranks_here, ranks_per_gpu)
    if model.device != "cpu":
        check_spare_bytes(model, kv_bytes, memory_of(model.device).free)
    num_blocks, windows = share_out(model, config, kv_bytes)
    if model.mixers is not None and config.window_keys == "replicated":
        log.warning("window_keys: not replicated beside recurrent states, so all keys are sharded")
    num_window_blocks = windows and windows.num_blocks
    kind = QuantizedPool if config.kv_dtype == "int8" else FloatKvPool
    size, dtype, device = config.block_size, model.dtype, model.device
    try:
        states = make_states(model, windows.num_blocks) if windows is not None and windows.is_state else None
        num_separate = None if states is not None else num_window_blocks
        return kind(model.layers, num_blocks, size, dtype, device, num_separate, states), windows
    except RuntimeError as error:
        raise StartError(f"kv_bytes: a pool of {num_blocks:,} blocks cannot be allocated: {error}") from error


def make_states(model: models.Model, num_states: int) -> StatePool | None:
    """A pool of recurrent states; None for a model without any."""
    if model.mixers is None:
        return None
    return StatePool(model.mixers.parts(), num_states, model.dtype, model.device)


def share_out(model: models.Model, config: EngineConfig, kv_bytes: int) -> tuple[int, WindowSpec | None]:
    """The number of blocks that fit in `kv_bytes`, and the window specification if windowed layers have separate
    blocks. Raises as `make_pool`.
    """
    windows = make_windows(model, config, kv_bytes) if model.mixers is None else plan_states(model, config, kv_bytes)
    separate = model.bytes_per_state or bytes_per_block(windowed_layers(model, config), model.dtype, config)
    taken = windows.num_blocks * separate if windows else 0
    needed = bytes_per_block(sharded_layers(model, config), model.dtype, config)
    num_blocks = (kv_bytes - taken) // needed if needed else ceil_div(UNLIMITED_TOKENS, config.block_size)
    if not num_blocks:
        beside = f" beside {taken:,} for {windows.noun}s" if windows is not None and taken else ""
        raise StartError(f"kv_bytes: {kv_bytes:,} bytes are too few for one block of {needed:,} bytes{beside}")
    return num_blocks, windows


def make_windows(model: models.Model, config: EngineConfig, kv_bytes: int) -> WindowSpec | None:
    """The window specification, with its number of blocks, if windowed layers have separate blocks. Raises StartError
    when the windows of one context and one generation do not fit.
    """
    layers = windowed_layers(model, config)
    if not layers:
        if config.window_keys == "replicated":
            log.info("window_keys: this model has no windowed layers, so all keys are sharded")
        return None
    windows, block_size = windows_of(layers), config.block_size
    size = bytes_per_block(layers, model.dtype, config)
    least = windows.least_blocks(max(config.replicate_below, block_size), block_size) * size
    most = kv_bytes if len(layers) == len(model.layers) else kv_bytes // 2
    usual = min(most, max(least, 4 * config.max_sequences * windows.seen_blocks(block_size) * size))
    taken = usual if config.window_bytes is None else config.window_bytes
    if taken > kv_bytes:
        raise StartError(f"window_bytes: {taken:,} bytes exceed the {kv_bytes:,} for all keys and values")
    if taken < least:
        name = "kv_bytes" if config.window_bytes is None else "window_bytes"
        wanted = f"a context and a generation need {least:,} bytes for windows of {windows.span:,} tokens"
        raise StartError(f"{name}: {wanted}, and {taken:,} are available")
    per_token = kv_bytes_per_token(layers, model.dtype, config)
    return msgspec.structs.replace(windows, num_blocks=taken // size, bytes_per_token=per_token)


def plan_states(model: models.Model, config: EngineConfig, kv_bytes: int) -> WindowSpec:
    """The specification of the pool of recurrent states. Raises StartError when the states of one context and one
    generation do not fit.
    """
    size = model.bytes_per_state
    states = WindowSpec(reaches=(STATE_SPAN,), bytes_per_token=size, is_state=True)
    least = states.least_blocks(config.block_size, config.block_size) * size
    usual = min(kv_bytes // 2, max(least, STATES_PER_SEQUENCE * config.max_sequences * size))
    taken = usual if config.state_bytes is None else config.state_bytes
    if taken > kv_bytes:
        raise StartError(f"state_bytes: {taken:,} bytes exceed the {kv_bytes:,} for all keys, values and states")
    if taken < least:
        name = "kv_bytes" if config.state_bytes is None else "state_bytes"
        wanted = f"a context and a generation need {least:,} bytes for recurrent states"
        raise StartError(f"{name}: {wanted}, and {taken:,} are available")
    return msgspec.structs.replace(states, num_blocks=taken // size)


def windows_of(layers: dict[int, LayerSpec]) -> WindowSpec:
    """The limited reaches of layers, without blocks yet."""
    return WindowSpec(reaches=tuple(dict.fromkeys(spec.reach for spec in layers.values())))


def bytes_per_block(layers: dict[int, LayerSpec], dtype: torch.dtype, config: EngineConfig) -> int:
    """Bytes of a block of keys and values over these layers. Raises ModelRefused when they cannot be kept in the
    requested dtype.
    """
    if config.kv_dtype == "int8":
        return QuantizedPool.bytes_per_block(layers, config.block_size)
    return sum(spec.num_stored for spec in layers.values()) * dtype.itemsize * config.block_size


def kv_bytes_per_token(layers: dict[int, LayerSpec], dtype: torch.dtype, config: EngineConfig) -> int:
    """Bytes of a token's keys and values over these layers, rounded up. Raises ModelRefused."""
    return ceil_div(bytes_per_block(layers, dtype, config), config.block_size)


def kv_dtype(model: models.Model, config: EngineConfig) -> str:
    """Type in which keys and values are kept."""
    return name_of(model.dtype) if config.kv_dtype == "auto" else config.kv_dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_kv_bytes(config: EngineConfig, device: str, num_ranks_here: int, ranks_per_gpu: int = 1) -> None:
    """Raises StartError when the requested pools exceed the total memory."""
    if config.kv_bytes is None:
        return
    memory, num_sharing = memory_of(device), sharing(device, num_ranks_here, ranks_per_gpu)
    if config.kv_bytes * num_sharing > memory.total:
        where = "this machine" if device == "cpu" else device
        there = f"the {memory.total:,} bytes of memory of {where}"
        raise StartError(f"kv_bytes: {config.kv_bytes:,} for each of {count_ranks(num_sharing)} here exceeds {there}")


def check_spare_bytes(model: models.Model, kv_bytes: int, free_bytes: int) -> None:
    """Raises StartError when a pool leaves too little memory for weights of lost ranks."""
    if model.spare_bytes and kv_bytes + model.spare_bytes > free_bytes:
        room = f"{human_bytes(model.spare_bytes)} for weights of lost ranks"
        there = f"the {human_bytes(free_bytes)} free on {model.device}"
        raise StartError(f"spare_ranks: {room}, and {human_bytes(kv_bytes)} for keys and values, exceed {there}")


def default_kv_bytes(model: models.Model, config: EngineConfig, num_ranks_here: int, ranks_per_gpu: int) -> int:
    """Default bytes for keys and values, based on the memory that is free now, after the weights were loaded."""
    memory = memory_of(model.device) if ranks_per_gpu == 1 else share_of(model.device, ranks_per_gpu)
    return kv_bytes_within(memory, model.device, model, config, num_ranks_here, is_shared=ranks_per_gpu > 1)


def kv_bytes_within(
    memory: resources.Memory,
    device: str,
    model: models.Model,
    config: EngineConfig,
    num_ranks_here: int,
    *,
    is_shared: bool = False,
) -> int:
    """Bytes for keys and values of each rank. On a CPU: a share of the free memory, which other processes use too. On a
    GPU: all of it except the workspace of steps. On both, the memory set aside for weights of lost ranks is left free.
    """
    if device == "cpu":
        return max(0, int((memory.free - num_ranks_here * model.spare_bytes) * FREE_MEMORY_SHARE / num_ranks_here))
    needed = workspace(model, config, num_ranks_here, memory.total, uses_nccl=not is_shared)
    found = max(0, memory.free - needed.total - model.spare_bytes)
    of = f"{human_bytes(found)} of {human_bytes(memory.free)} free on {device} after loading the weights"
    spare = f", {human_bytes(model.spare_bytes)} for weights of lost ranks" if model.spare_bytes else ""
    log.info("kv_bytes: %s; the others are %s%s", of, needed, spare)
    return found


def memory_of(device: str) -> resources.Memory:
    """The total and the free memory of a device."""
    if device == "cpu":
        return resources.memory()
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return resources.Memory(total, free)


def share_of(device: str, num_ranks: int) -> resources.Memory:
    """The memory of one of the ranks that share a GPU, independent of the memory that the others have taken of their
    shares.
    """
    memory = memory_of(device)
    share = memory.total // num_ranks
    return resources.Memory(share, min(memory.free, share - CONTEXT - torch.cuda.memory_reserved(device)))


def sharing(device: str, num_ranks_here: int, ranks_per_gpu: int = 1) -> int:
    """The number of ranks that share the memory: those of the machine, or of the GPU."""
    return num_ranks_here if device == "cpu" else ranks_per_gpu
