# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Samples the tokens of all rows on a GPU by kernels that sort no row, see `longleaf.kernels.gpu.device.sampling`.

Each row gets the result of `distribution.py` in float64, as in `fixed_shape`, but sums of weights are those of integers
in units of 2^-61 of the row's sum, so that they depend on no order. A token may differ from the definition's if one of
its sums is within rounding error of a limit: see there for how often. Number and shape of the launches depend on no
values, so a CUDA graph can hold them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longleaf.kernels.gpu.launch import Launcher, launch
from longleaf.kernels.gpu.work_items import power_of_two
from longleaf.runs import ceil_div
from workers.sampling.fixed_shape import Needs, Parameters
from workers.sampling.history import TokenHistories

GROUP = 64
"""Logits whose maximum is stored for the search of the likeliest tokens."""
MAX_BYTES = 1 << 28
"""Temporary memory of rows that are sampled together, unless a single row needs more."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class SamplerTuning(NamedTuple):
    """Sizes that affect only speed."""

    block: int = 1024
    """Tokens of a program, a power of two."""
    warps: int = 4
    """Of programs of a block."""
    levels: int = 256
    """Steps of the histogram of scores, a power of two."""
    tile: int = 1024
    """Candidates that the search reads at a time."""
    search_warps: int = 8
    """Of programs that search a row's candidates."""
    capacity: int = 8192
    """Candidates of a row in the buffer; a row with more is read twice per search step instead."""
    row_warps: int = 8
    """Of programs that plan or draw a row."""
    small: int = 2048
    """Up to so many candidates, all tokens above the threshold are candidates as well, so that one program draws."""


DEFAULT = SamplerTuning()


def is_supported(logits_RV: Tensor) -> bool:
    """Whether the kernels can sample from these logits: on a GPU, if Triton is installed."""
    return logits_RV.is_cuda and logits_RV.dtype in DTYPES and logits_RV.stride(-1) == 1 and _has_triton()


def max_rows(size: int, tuning: SamplerTuning = DEFAULT) -> int:
    """Rows of `size` logits that are sampled together."""
    capacity = min(tuning.capacity, power_of_two(size, 1))
    num_blocks = ceil_div(size, min(tuning.block, power_of_two(size, GROUP)))
    # scores; ids, scores and mass of candidates; levels and results of blocks
    num_bytes = 8 * size + 20 * capacity + (4 * tuning.levels + 128) * num_blocks
    return max(1, MAX_BYTES // num_bytes)


def choose(
    logits_RV: Tensor,
    parameters: Parameters,
    histories: TokenHistories,
    needs: Needs,
    before_RM: Tensor | None = None,
    *,
    tuning: SamplerTuning = DEFAULT,
    launcher: Launcher = launch,
) -> Tensor:
    """The id of the next token of each row of logits [R, V], float32 or 16 bits: see `fixed_shape.choose`, with the
    same parameters and result. Parameters and histories are on the device of the logits; nothing waits for it.
    """
    from longleaf.kernels.gpu.device import sampling

    (num_rows, size), device = logits_RV.shape, logits_RV.device
    block = min(tuning.block, power_of_two(size, GROUP))
    num_blocks = ceil_div(size, block)
    num_top, capacity = min(needs.num_top, size), min(tuning.capacity, power_of_two(size, 1))

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    maxima, minima, sums, raw_maxima, raw_sums = empty(5, num_rows, num_blocks, dtype=torch.float64).unbind()
    best_ids, is_broken, offsets = empty(3, num_rows, num_blocks, dtype=torch.int32).unbind()
    above, eligible = empty(2, num_rows, num_blocks, dtype=torch.int64).unbind()
    peaks, plans = empty(num_rows, 2, dtype=torch.float64), empty(num_rows, 8, dtype=torch.int64)
    ids = empty(num_rows, dtype=torch.int64)
    scores = empty(num_rows * size if needs.is_adjusted else 1, dtype=torch.float64)
    num_groups = num_blocks * (block // GROUP)
    groups = empty(num_rows * num_groups if num_top >= 0 else 1, dtype=torch.float32)
    num_before = 0 if before_RM is None else before_RM.shape[1]
    sizes = {"row_stride": logits_RV.stride(0), "size": size, "num_blocks": num_blocks}
    constants: dict[str, Any] = {
        "BLOCK": block,
        "BLOCKS_PAD": power_of_two(num_blocks, 1),
        "LEVELS": tuning.levels,
        "IS_ADJUSTED": needs.is_adjusted,
        "CUTS": needs.cuts,
        "DRAWS": needs.draws,
    }
    tensors = {
        **{name: values_R.contiguous() for name, values_R in parameters._asdict().items()},
        "repetition": parameters.repetition_penalty.contiguous(),
        "presence": parameters.presence_penalty.contiguous(),
        "frequency": parameters.frequency_penalty.contiguous(),
        "logits": logits_RV,
        "scores": scores,
        "maxima": maxima,
        "minima": minima,
        "sums": sums,
        "best_ids": best_ids,
        "is_broken": is_broken,
        "raw_maxima": raw_maxima,
        "raw_sums": raw_sums,
        "group_maxima": groups,
        "is_seen": histories.is_seen_PV.view(torch.uint8),
        "counts": histories.counts_PV,
        "bias_ids": histories.bias_ids_PB,
        "biases": histories.biases_PB,
        "before": ids if before_RM is None else before_RM.contiguous(),
        "offsets": offsets,
        "peaks": peaks,
        "plans": plans,
        "above": above,
        "eligible_mass": eligible,
        "ids": ids,
    }
    others = {
        **sizes,
        **constants,
        "num_before": num_before,
        "GROUP": GROUP,
        "NUM_BIASES": histories.biases_PB.shape[1],
        "HAS_LOGPROBS": num_top >= 0,
        "capacity": capacity,
        "SMALL": min(tuning.small, capacity),
        "TILE": tuning.tile,
    }

    def run(kernel: Any, grid: tuple[int, ...], num_warps: int, **more: Any) -> None:
        known = {**tensors, **others, **more}
        arguments = {name: known[name] for name in kernel.arg_names}
        # a fused multiplication and addition rounds once, and the definition rounds twice
        launcher(kernel, grid, **arguments, num_warps=num_warps, enable_fp_fusion=False)

    by_block, by_row = (num_blocks, num_rows), (num_rows,)
    run(sampling.score_blocks, by_block, tuning.warps)
    counts = found = {}
    if needs.draws and needs.cuts:
        counts = {"level_counts": empty(num_rows, num_blocks, tuning.levels, dtype=torch.int32)}
        run(sampling.count_levels, by_block, tuning.warps, **counts)
    run(sampling.plan_rows, by_row, tuning.row_warps, **(counts or {"level_counts": offsets}))
    if needs.draws:
        if needs.cuts:
            found = {
                "found_ids": empty(num_rows, capacity, dtype=torch.int32),
                "found_scores": empty(num_rows, capacity, dtype=torch.float64),
                "found_mass": empty(num_rows, capacity, dtype=torch.int64),
            }
            run(sampling.gather_candidates, by_block, tuning.warps, **found)
            run(sampling.find_thresholds, by_row, tuning.search_warps, **found)
        # without candidates, placeholders that the kernel does not read
        found = found or {"found_ids": offsets, "found_scores": maxima, "found_mass": above}
        run(sampling.weigh_blocks, by_block, tuning.warps, **found)
        run(sampling.draw_rows, by_row, tuning.row_warps)
    if num_top < 0:
        return ids[:, None]
    reported = empty(num_rows, 2 + 2 * num_top, dtype=torch.float64)
    more = {"num_groups": num_groups, "GROUPS_PAD": power_of_two(num_groups, 1), "NUM_TOP": num_top}
    run(sampling.report_logprobs, by_row, 8, reported=reported, **more)
    return reported


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        return False
    return True
