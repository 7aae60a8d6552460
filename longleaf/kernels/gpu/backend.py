# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""GPU backend in Triton: one launch computes attention for all reads, and one merges the partials."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longleaf.attention import packed as packed_form
from longleaf.attention.block_attribution import AttributionColumns
from longleaf.attention.masks import Read, Reads
from longleaf.attention.partial import Partial
from longleaf.kernels.backend import Int8Layer, check_shapes, lies_in
from longleaf.kernels.gpu import constants, tuning
from longleaf.kernels.gpu.block_sums import attribution_arguments, attribution_numbers, bags_of
from longleaf.kernels.gpu.device.block_attribution import add_shares
from longleaf.kernels.gpu.device.decode import attend_items
from longleaf.kernels.gpu.device.fold import fold_items, fold_packed, pack_rows
from longleaf.kernels.gpu.device.int8 import attend_items_int8
from longleaf.kernels.gpu.device.store import store_int8, store_tokens
from longleaf.kernels.gpu.device.unmasked import attend_unmasked
from longleaf.kernels.gpu.launch import Launcher, launch
from longleaf.kernels.gpu.tables import AttributedRanges, DeviceLaunchTables, DeviceWork, WorkKey
from longleaf.kernels.gpu.work_items import Shape, work_of
from longleaf.runs import ceil_div

PROGRAMS_PER_MULTIPROCESSOR = tuning.NONE.programs
"""Programs of the attention kernels that run concurrently on a multiprocessor; with few rows each has one item."""
ATTENTION = {"items": attend_items, "unmasked": attend_unmasked}
"""Kernels by `tuning.Tile.kernel`."""


class TritonKernels:
    """Kernels written in Triton, see `longleaf.kernels.backend`."""

    name = "triton"

    def __init__(
        self,
        num_multiprocessors: int,
        launcher: Launcher = launch,
        tunings: tuning.Table | None = None,
        sizes: Mapping[str, constants.Constants] | None = None,
    ) -> None:
        """`tunings` replaces the table of the current GPU, and `sizes`, by kernel, some constants of `fold_items` and
        `store_int8`."""
        self._multiprocessors = num_multiprocessors
        self._launch = launcher
        self._limits = constants.limits_here()
        self._tunings = tuning.table_of(self._limits) if tunings is None else tunings
        self._sizes = sizes or {}

    @staticmethod
    def load() -> "TritonKernels":
        """The backend of the current GPU. Raises RuntimeError if there is none."""
        return TritonKernels(count_multiprocessors())

    def attend(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSV: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        """See `Backend`. Queries, keys and values are float32, bfloat16 or float16."""
        check_shapes(q_THD, k_KSD, v_KSV)
        q_THD = together(q_THD)
        num_kv_heads, value_dim = v_KSV.shape[0], v_KSV.shape[2]
        types, is_latent = (q_THD.dtype, k_KSD.dtype), lies_in(v_KSV, k_KSD)
        dtype, dim, has_cap = torch.promote_types(*types), q_THD.shape[2], softcap is not None
        chosen = constants.attend(*types, dim, value_dim, self._limits, is_latent=is_latent, has_cap=has_cap)
        is_tuned = is_latent or dim == value_dim
        tuned = self._tunings.get((dtype, dim), tuning.NONE) if is_tuned else tuning.NONE
        most_rows = tuned.max_rows or constants.max_tile_rows(dtype, dim, self._limits, is_latent=is_latent)
        work, num_programs = self._work(reads, q_THD, num_kv_heads, most_rows, chosen["TILE_KEYS"], tuned)
        tile = tuned.tiles.get(work.tile_rows) if scale > 0 else None
        is_attributed = work.attribution is not None
        if tile is None:
            kernel, chosen = attend_items, constants.with_rows(chosen, work.tile_rows, is_attributed=is_attributed)
        else:
            is_attributed = is_attributed and tile.keys >= chosen["SLOTS"]
            kernel, chosen = ATTENTION[tile.kernel], tuning.constants_of(tile, chosen, is_attributed=is_attributed)
        parts = empty_partial(work.num_part_rows, num_kv_heads, value_dim, q_THD)
        is_attributed, group = chosen.get("ATTRIBUTES", False), q_THD.shape[1] // num_kv_heads
        attribution = attribution_arguments(work, parts, group, is_attributed=is_attributed)
        self._launch(
            kernel,
            (num_programs,),
            *(work.table, q_THD, k_KSD, v_KSV, parts.out_THD, parts.lse_TH, scale, softcap or 0.0),
            *(group, num_kv_heads),
            *(*q_THD.stride()[:2], *k_KSD.stride()[:2], *v_KSV.stride()[:2]),
            *attribution,
            **chosen,
        )
        return self._folded(q_THD, work, parts)

    def attend_int8(
        self, q_THD: Tensor, layer: Int8Layer, reads: Sequence[Read], scale: float, softcap: float | None = None
    ) -> Partial:
        """See `Backend`."""
        check_shapes(q_THD, layer.keys_KSD, layer.values_KSD)
        q_THD = together(q_THD)
        num_kv_heads, num_slots, dim = layer.keys_KSD.shape
        chosen = constants.attend_int8(q_THD.dtype, dim, layer.block_size, self._limits, has_cap=softcap is not None)
        tuned = self._tunings.get((torch.int8, dim), tuning.NONE) if q_THD.dtype != torch.float32 else tuning.NONE
        most_rows = tuned.max_rows or constants.INT8_TILE_ROWS
        if tile := tuned.tiles.get(constants.INT8_TILE_ROWS):
            chosen = tuning.int8_constants_of(tile, chosen)
        work, num_programs = self._work(reads, q_THD, num_kv_heads, most_rows, chosen["TILE_KEYS"], tuned)
        is_attributed = work.attribution is not None
        chosen = constants.with_rows(chosen, constants.INT8_TILE_ROWS, is_attributed=is_attributed)
        if work.tile_rows > constants.INT8_TILE_ROWS:
            tile = tuned.tiles[work.tile_rows]
            chosen = tuning.int8_constants_of(tile, chosen)
            chosen["TILE_ROWS"] = tile.rows
        parts = empty_partial(work.num_part_rows, num_kv_heads, dim, q_THD)
        self._launch(
            attend_items_int8,
            (num_programs,),
            *(work.table, q_THD, *(numbers.view(torch.int16) for numbers in layer[:3]), layer.scales_KS),
            *(parts.out_THD, parts.lse_TH, scale, softcap or 0.0),
            *(q_THD.shape[1] // num_kv_heads, num_kv_heads, num_slots, *q_THD.stride()[:2]),
            *attribution_arguments(work, parts, q_THD.shape[1] // num_kv_heads, is_attributed=chosen["ATTRIBUTES"]),
            **chosen,
        )
        return self._folded(q_THD, work, parts)

    def store(self, pool: Sequence[Tensor], slots_T: Tensor, tokens: Sequence[Tensor]) -> None:
        """See `Backend`."""
        keys, values = pool[0], pool[-1]
        k_KTD, v_KTV = together(tokens[0]), together(tokens[len(pool) - 1])
        chosen = constants.store(k_KTD.shape[2], v_KTV.shape[2], has_values=len(pool) > 1)
        num_kv_heads, num_tokens, _ = k_KTD.shape
        self._launch(
            store_tokens,
            (ceil_div(num_tokens, chosen["TILE_TOKENS"]), num_kv_heads),
            *(slots_T, k_KTD, v_KTV, keys, values, num_tokens),
            *(stride for tensor in (k_KTD, v_KTV, keys, values) for stride in tensor.stride()[:2]),
            **chosen,
        )

    def store_int8(self, layer: Int8Layer, slots_T: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> None:
        """See `Backend`."""
        k_KTD, v_KTD = together(k_KTD), together(v_KTD)
        num_kv_heads, num_tokens, dim = k_KTD.shape
        self._launch(
            store_int8,
            (num_tokens, num_kv_heads),
            *(slots_T, k_KTD, v_KTD, *layer[:4], num_tokens, layer.keys_KSD.shape[1]),
            *(*k_KTD.stride()[:2], *v_KTD.stride()[:2]),
            **{**constants.store_int8(dim, layer.block_size), **self._sizes.get("store_int8", {})},
        )

    def pack(self, partial: Partial, dtype: torch.dtype) -> Tensor:
        """See `Backend`."""
        out_THD, lse_TH = together(partial.out_THD), partial.lse_TH
        num_tokens, num_heads, dim = out_THD.shape
        packed_THC = out_THD.new_empty(num_tokens, num_heads, packed_form.num_columns(dim, dtype), dtype=dtype)
        chosen, num_rows = constants.packed(dim, dtype), num_tokens * num_heads
        self._launch(
            pack_rows,
            (ceil_div(num_rows, chosen["TILE_ROWS"]),),
            *(out_THD, lse_TH, packed_THC, num_rows, num_heads, *out_THD.stride()[:2], *lse_TH.stride()),
            **chosen,
        )
        return packed_THC

    def fold(self, packed_NTHC: Tensor) -> Partial:
        """See `Backend`."""
        packed_NTHC = packed_NTHC.contiguous()
        num_partials, num_tokens, num_heads, columns = packed_NTHC.shape
        dim = columns - packed_form.num_columns(0, packed_NTHC.dtype)
        folded = empty_partial(num_tokens, num_heads, dim, packed_NTHC)
        chosen, num_rows = constants.packed(dim, packed_NTHC.dtype), num_tokens * num_heads
        self._launch(
            fold_packed,
            (ceil_div(num_rows, chosen["TILE_ROWS"]),),
            *(packed_NTHC, folded.out_THD, folded.lse_TH, num_partials, num_rows, packed_NTHC.stride(0)),
            **chosen,
        )
        return folded

    def add_shares(
        self,
        reported_KE2: Tensor,
        lse_TH: Tensor,
        sink_H: Tensor | None,
        columns: AttributionColumns,
        found: tuple[Tensor, Tensor, Tensor],
        *,
        sink_column: int,
        first_head: int,
    ) -> None:
        """See `AttributionBackend`."""
        bags = bags_of(columns, found[0].shape[1], sink_column, reported_KE2.device)
        num_kv_heads, num_heads = len(reported_KE2), lse_TH.shape[1]
        self._launch(
            add_shares,
            (found[0].numel(),),
            *(*bags, reported_KE2, lse_TH, lse_TH if sink_H is None else together(sink_H), *found),
            *(num_heads // num_kv_heads, num_heads, reported_KE2.stride(0), *lse_TH.stride(), first_head),
            **constants.add_shares(num_heads, has_sinks=sink_H is not None),
        )

    def tables(self, seen: Reads, *, is_shared: bool) -> DeviceLaunchTables:
        """See `CapturableBackend`."""
        return DeviceLaunchTables([key for key in seen.cache if isinstance(key, WorkKey)], is_shared=is_shared)

    def _work(
        self,
        reads: Sequence[Read],
        q_THD: Tensor,
        num_kv_heads: int,
        max_tile_rows: int,
        tile_keys: int,
        tuned: tuning.Tuning,
    ) -> tuple[DeviceWork, int]:
        """The work items of the reads, computed once for all layers with the same pattern, and the number of
        programs."""
        reads = reads if isinstance(reads, Reads) else Reads(reads)
        shape = Shape(
            q_THD.shape[0], q_THD.shape[1] // num_kv_heads, num_kv_heads, max_tile_rows, tile_keys, tuned.min_piece
        )
        num_programs = tuned.programs * self._multiprocessors
        key = WorkKey(q_THD.device, num_programs, shape)
        if key not in reads.cache:
            work = work_of(reads, shape, num_programs)
            # copies from pinned memory are asynchronous; other accelerators copy small data directly
            sums = reads.attributed
            attributed = attribution_numbers(sums, reads, work.reads, shape.group) if sums else []
            numbers = torch.tensor(work.numbers + attributed, dtype=torch.long, pin_memory=q_THD.is_cuda)
            table, rest = numbers.to(q_THD.device, non_blocking=True).split([len(work.numbers), len(attributed)])
            requested = AttributedRanges(sums, rest) if sums else None
            reads.cache[key] = DeviceWork(table, work.num_part_rows, work.tile_rows, requested)
        return reads.cache[key], num_programs

    def _folded(self, q_THD: Tensor, work: DeviceWork, parts: Partial) -> Partial:
        (num_tokens, num_heads, _), (_, num_kv_heads, value_dim) = q_THD.shape, parts.out_THD.shape
        folded = empty_partial(num_tokens, num_heads, value_dim, q_THD)
        chosen = {**constants.fold_items(value_dim), **self._sizes.get("fold_items", {})}
        self._launch(
            fold_items,
            (num_tokens * num_heads, ceil_div(value_dim, chosen["TILE_VALUES"])),
            *(work.table, parts.out_THD, parts.lse_TH, folded.out_THD, folded.lse_TH),
            *(num_heads // num_kv_heads, num_kv_heads),
            **chosen,
        )
        return folded


def count_multiprocessors() -> int:
    """Number of multiprocessors of the current GPU. Raises RuntimeError if there is none."""
    if not torch.cuda.is_available():
        raise RuntimeError("this torch finds no GPU")
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def empty_partial(num_rows: int, num_heads: int, dim: int, like: Tensor) -> Partial:
    """An uninitialised partial on the device of `like`."""
    out = like.new_empty(num_rows, num_heads, dim, dtype=torch.float32)
    return Partial(out, like.new_empty(num_rows, num_heads, dtype=torch.float32))


def together(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous last dim."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
