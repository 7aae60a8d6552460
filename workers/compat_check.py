"""Checks whether ranks could serve a checkpoint.

`python -m workers.compat_check '{"model": DIR, ...}'` prints an AttentionReport for this EngineConfig. `--load` reads
the weights. Numbers that follow are the bytes of each rank's pool.

Without `--load` no weights are read: see `workers.model.meta_model`. Three checks need the weights: that no weight is
missing, that no operation outside of attention mixes rows, and that the logits are those of plain attention.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import msgspec

from longleaf.config import EngineConfig, WeightsChoice, WindowKeys
from longleaf.errors import InvalidArgument, ModelRefused, StartError
from longleaf.kernels import registry
from longleaf.model_report import (
    AttentionKind,
    AttentionReport,
    CapacityPlan,
    ExchangeReport,
    GpuPlan,
    RankPlan,
    ReplicatedReport,
    StateReport,
)
from longleaf.positions import UNLIMITED_TOKENS, WindowSpec
from longleaf.shares import most_parts
from longleaf.weights_choice import WeightsInMemory, WeightSizes, choose_weights, memory_of_rank
from workers.exactness import check_exact, describe_two_formulas
from workers.kv_cache.pools import (
    kv_bytes_per_token,
    kv_bytes_within,
    kv_dtype,
    memory_of,
    name_of,
    sharded_layers,
    share_out,
    sharing,
    windowed_layers,
    windows_of,
)
from workers.kv_cache.workspace_estimate import workspace
from workers.model import model as models
from workers.model.meta_model import Outline, outline
from workers.model.model import LayerSpec, Model
from workers.model.quantized_weights import pop_quantization
from workers.model.weight_parts import divided_bytes, plan_weights, share_bytes
from workers.model.weight_reader import dtype_of, quantized_layouts, stored_sizes
from workers.model.weight_shares import Share, growth_bytes
from workers.rank import choose_device, count_gpus

WINDOW_KEYS: tuple[WindowKeys, ...] = get_args(WindowKeys)
GPU_BYTES, GPUS_PER_MACHINE = 80 * 10**9, 8
"""The GPUs for which every report has a plan."""
UNKNOWN = "the weights were not read"
"""The reason why exactness is unknown."""


def check(config: EngineConfig, *, has_weights: bool, pools: Sequence[int] = ()) -> AttentionReport:
    """Checks a checkpoint. `has_weights`: load the weights, as a rank does. `pools`: the bytes of each rank's pool, if
    known.
    """
    try:
        quantized, sizes = measure_quantized(config)
        known = outline(config.model, config.dtype)
        whole, stored = (weight_bytes(known, chosen) for chosen in ({}, sizes))
        shares = measure_shares(known, config, {})
        weight_sizes = WeightSizes(whole, stored if sizes else 0)
        gpus = plan_gpus(known.model, config, whole, shares)
        chosen = chosen_weights(weight_sizes, config, can_share=bool(shares.num_bytes))
        config = msgspec.structs.replace(config, weights=chosen.weights, weights_dtype=chosen.weights_dtype)
        is_stored = bool(sizes) and chosen.weights_dtype == "stored"
        if is_stored:
            shares = measure_shares(known, config, sizes)
        model = models.load(config.model, config.dtype, "cpu", keeps_stored=is_stored) if has_weights else known.model
        bytes_per_token = kv_bytes_per_token(model.layers, model.dtype, config)
        note = verify(model, config) if has_weights else UNKNOWN
        two_formulas = describe_two_formulas(model)
        config.check()
    except (InvalidArgument, ModelRefused, StartError) as error:  # such as limits of sharded weights
        return AttentionReport(reason=str(error))
    size, other = (stored, whole) if is_stored else (whole, stored)
    if config.kv_bytes:
        pools = pools or [config.kv_bytes] * config.world_size
    if config.has_shares and shares.note:
        return AttentionReport(reason=shares.note)
    if config.has_shares:
        model = replace(model, spare_bytes=shares.spare_bytes)
    pools = pools or kv_bytes_beside(max(shares.num_bytes) if config.has_shares else size, model, config)
    windowed = windowed_layers(model, msgspec.structs.replace(config, window_keys="replicated"))
    return AttentionReport(
        dtype=name_of(model.dtype),
        kv_dtype=kv_dtype(model, config),
        kinds=kinds(model.layers),
        trained=model.rotary.trained,
        bytes_per_token=bytes_per_token,
        states=states_of(model),
        replicated=replicated(model, msgspec.structs.replace(config, window_keys="replicated")),
        weight_bytes=size,
        share_bytes=shares.num_bytes,
        share_note=shares.note,
        spare_ranks=config.spare_ranks,
        spare_bytes=shares.spare_bytes,
        weights=config.weights,
        weights_dtype=chosen.weights_dtype,
        other_bytes=other if sizes else 0,
        exchanges=shares.exchanges,
        quantized=quantized,
        has_weights=has_weights,
        is_exact=None if note else not two_formulas,
        exactness_note=note or two_formulas,
        gpus=gpus,
        plans=tuple(plan(model, config, mode, pools) for mode in (WINDOW_KEYS if windowed else WINDOW_KEYS[:1])),
    )


def measure_quantized(config: EngineConfig) -> tuple[dict[str, int], dict[str, float]]:
    """The number of quantized tensors by layout, and the bytes per number of those that may remain as stored, by their
    parameter. Raises ModelRefused.
    """
    folder, model_config = Path(config.model), models.read_config(config.model)
    quantization = pop_quantization(model_config)
    if quantization is None:
        return {}, {}
    found = quantized_layouts(folder, quantization)
    if count_gpus() and config.device != "cpu":
        return found, {}
    dtype = dtype_of(config.model, model_config, config.dtype, quantization)
    return found, stored_sizes(models.build_on_meta(model_config, dtype), folder, quantization)


def weight_bytes(known: Outline, sizes: Mapping[str, float]) -> int:
    """Bytes of all weights. `sizes`: bytes per number of parameters that remain as stored."""
    return sum(round(one.numel() * sizes.get(name, one.itemsize)) for name, one in known.parameters.items())


@dataclass(frozen=True, slots=True)
class SharesOfWeights:
    """Bytes of the weights on each of several ranks if they are sharded, or the reason why they cannot be."""

    num_bytes: tuple[int, ...] = ()
    """For each rank; empty for one rank."""
    spare_bytes: int = 0
    """The largest number of bytes that a rank sets aside for weights of lost ranks."""
    exchanges: ExchangeReport | None = None
    note: str = ""
    """The reason; empty if weights can be sharded."""


def measure_shares(known: Outline, config: EngineConfig, stored: Mapping[str, float]) -> SharesOfWeights:
    """Measures the shares of the ranks of a config, whether or not it shards the weights. `stored`: bytes per number of
    parameters that remain as stored.
    """
    count, num_spare = config.world_size, config.spare_ranks
    if count == 1 or num_spare >= count:
        return SharesOfWeights()
    try:
        weight_plan = plan_weights(known, count)
    except ModelRefused as error:
        return SharesOfWeights(note=str(error))
    found = weight_plan.exchanges
    exchanges = ExchangeReport(merges=len(known.model.layers), gathers=found.gathers, sums=found.sums)
    shares = [Share.even(index, count) for index in range(count)]
    room = [
        growth_bytes(divided_bytes(known, weight_plan, share, stored), len(share.parts), most_parts(count, num_spare))
        for share in shares
        if num_spare
    ]
    sizes = tuple(share_bytes(known, weight_plan, share, stored) for share in shares)
    return SharesOfWeights(sizes, max(room, default=0), exchanges)


def chosen_weights(sizes: WeightSizes, config: EngineConfig, *, can_share: bool) -> WeightsInMemory:
    """The weights that `serve` chooses for ranks on this machine."""
    num_gpus = count_gpus() if config.device != "cpu" else 0
    weights = config.weights if config.weights != "auto" or can_share else "whole"
    chosen = weights, config.weights_dtype
    return choose_weights(*chosen, sizes, memory_of_rank(config, num_gpus), config.world_size, config.kv_bytes or 0)


def plan_gpus(model: Model, config: EngineConfig, whole_bytes: int, shares: SharesOfWeights) -> GpuPlan:
    """The capacity of GPUs for dequantized weights, of `whole_bytes` or in these shares."""
    ways: tuple[WeightsChoice, ...] = ("whole", "sharded") if config.weights == "auto" else (config.weights,)
    ways = ways if shares.num_bytes else ("whole",)
    found = [_plan_gpus(model, msgspec.structs.replace(config, weights=way), whole_bytes, shares) for way in ways]
    return next((one for one in found if one.tokens), found[-1])


def _plan_gpus(model: Model, config: EngineConfig, whole_bytes: int, shares: SharesOfWeights) -> GpuPlan:
    count = config.world_size
    needed = workspace(model, config, min(count, GPUS_PER_MACHINE), GPU_BYTES).total
    weight_bytes = max(shares.num_bytes) if config.has_shares else whole_bytes
    free = GPU_BYTES - needed - weight_bytes - (shares.spare_bytes if config.has_shares else 0)
    tokens = max(0, free) // kv_bytes_per_token(model.layers, model.dtype, config) * count
    return GpuPlan(
        num_gpus=count,
        total_bytes=GPU_BYTES,
        weights=config.weights,
        weight_bytes=weight_bytes,
        workspace_bytes=needed,
        tokens=tokens,
    )


def verify(model: Model, config: EngineConfig) -> str:
    """Compares the model with plain attention, like a rank at its start. Raises ModelRefused."""
    return check_exact(model, registry.choose(config.kernels, "cpu", model.dtype), config)


def plan(model: Model, config: EngineConfig, window_keys: WindowKeys, pools: Sequence[int]) -> CapacityPlan:
    """The capacity of the pools, with the layout that ranks choose at their start."""
    given = config.window_bytes if window_keys == "replicated" else None
    config = msgspec.structs.replace(config, window_keys=window_keys, window_bytes=given)
    size = config.block_size
    try:
        shares = [share_out(model, config, kv_bytes) for kv_bytes in pools]
    except StartError as error:
        return CapacityPlan(window_keys=window_keys, reason=str(error))
    # blocks of windows have the same ids on every rank, so their number is the minimum over ranks
    windows = min(
        (resident for _, resident in shares if resident), key=lambda resident: resident.num_blocks, default=None
    )
    rooms = tuple(
        RankPlan(rank=rank, kv_bytes=kv_bytes, tokens=num_blocks * size)
        for rank, (kv_bytes, (num_blocks, _)) in enumerate(zip(pools, shares, strict=True))
    )
    return CapacityPlan(
        window_keys=window_keys,
        rooms=rooms,
        tokens=sum(room.tokens for room in rooms),
        is_unlimited=any(room.tokens >= UNLIMITED_TOKENS for room in rooms),
        window_tokens=windows.num_blocks * size if windows and not windows.is_state else 0,
        ends=num_ends(windows, windows.block_size(size)) if windows else 0,
        num_states=windows.num_blocks if windows and windows.is_state else 0,
    )


def num_ends(windows: WindowSpec, block_size: int) -> int:
    """The number of contexts whose windows fit, if contexts are ingested one at a time. A window may begin within a
    block, and an ingest temporarily needs additional blocks for the windows of its chunks.
    """
    seen_blocks = windows.seen_blocks(block_size)
    return (windows.num_blocks - (windows.chunk_blocks(block_size) - seen_blocks)) // seen_blocks


def states_of(model: Model) -> StateReport | None:
    """The layers with a recurrent state; None if there are none."""
    if model.mixers is None:
        return None
    layers, one_by_one = sorted(model.mixers.layers), sorted(model.mixers.one_by_one)
    return StateReport(layers=tuple(layers), num_bytes=model.bytes_per_state, one_by_one=tuple(one_by_one))


def replicated(model: Model, config: EngineConfig) -> ReplicatedReport | None:
    """The bytes of keys and values under a config with replicated windows; None if no layer is windowed."""
    windowed = windowed_layers(model, config)
    if not windowed:
        return None
    return ReplicatedReport(
        bytes_per_token=kv_bytes_per_token(sharded_layers(model, config), model.dtype, config),
        bytes_per_window=windows_of(windowed).span * kv_bytes_per_token(windowed, model.dtype, config),
    )


def kinds(layers: dict[int, LayerSpec]) -> tuple[AttentionKind, ...]:
    """The layers grouped by kind of attention."""
    alike: dict[LayerSpec, list[int]] = {}
    for layer, spec in sorted(layers.items()):
        alike.setdefault(spec, []).append(layer)
    return tuple(
        AttentionKind(
            layers=tuple(found),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim if spec.value_dim != spec.head_dim else None,
            window=spec.reach.window,
            section=spec.reach.section,
        )
        for spec, found in alike.items()
    )


def kv_bytes_beside(weight_bytes: int, model: Model, config: EngineConfig) -> list[int]:
    """The default bytes of each rank for keys and values, once the weights are loaded. Assumes that CPU ranks are on
    this machine, and that GPU ranks are on identical machines with one rank per GPU.
    """
    num_gpus = count_gpus()
    gpus = [rank % num_gpus if num_gpus else 0 for rank in range(config.world_size)]
    devices = [choose_device(config.device, gpu, num_gpus, config.world_size) for gpu in gpus]
    num_ranks_here = config.world_size if devices[0] == "cpu" else len(set(devices))
    found: dict[str, int] = {}
    for device in set(devices):
        memory = memory_of(device)
        memory = memory._replace(free=memory.free - sharing(device, num_ranks_here) * weight_bytes)
        found[device] = kv_bytes_within(memory, device, model, config, num_ranks_here)
    return [found[device] for device in devices]


if __name__ == "__main__":
    _config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    _pools = [int(argument) for argument in sys.argv[2:] if argument != "--load"]
    _report = check(_config, has_weights="--load" in sys.argv[2:], pools=_pools)
    print(msgspec.json.encode(_report).decode())
