# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""GPU backend that uses flash kernels for many rows, as in prefill, and Triton kernels otherwise.

Flash kernels support 16-bit types, accumulate in float32, and round the result to the type of the queries. So the
partials of rounds have an error of half a unit in the last place of that type, like the merged row in the model's own
type. Their lse is float32. The backend `triton` never rounds partials.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.attention import reference
from longleaf.attention.masks import Read, Reads
from longleaf.attention.partial import Partial
from longleaf.formatting import human_rounded
from longleaf.kernels.backend import check_shapes
from longleaf.kernels.gpu import constants, varlen, varlen_plan
from longleaf.kernels.gpu.backend import TritonKernels, count_multiprocessors, empty_partial
from longleaf.kernels.gpu.device.rounds import fold_rounds, propagate_nonfinite
from longleaf.kernels.gpu.launch import Launcher, launch
from longleaf.kernels.gpu.varlen import FlashSource, Launch
from longleaf.runs import ceil_div

PROBE_ROWS, PROBE_KEYS, PROBE_HEADS, PROBE_DIM = 530, 2800, 4, 64
BROKEN = 2500
UNSEEN = slice(2420, 2450)
"""Slots with non-finite test data."""
SCALE = 0.25
CHUNK_ROWS, CHUNK_PASTS, CHUNK_HEADS, CHUNK_REPEATS = 4096, (16384, 12288), (32, 8, 128), 4
"""A chunk of a usual model, of which the time decides between flash kernels."""
PLAN_USES = 320
"""Calls over which the time of a plan for a number of rows and keys is spread: ten chunks of 32 layers."""
ALIKE = 1.05
"""Times within this factor are alike, so that the choice is the same at each start."""

log = logging.getLogger(__name__)


class DeviceRounds(NamedTuple):
    """The rounds of a chunk on the device."""

    launches: Sequence[Launch]
    pieces: Tensor
    """[P, 5] int32, see `varlen_plan.LaunchPiece`."""
    members: Tensor
    """[T] int32, see `varlen_plan.members`."""
    rest: Reads
    """Reads for the other kernels."""


class FlashKernels(TritonKernels):
    """Flash kernels for many rows, see `longleaf.kernels.gpu.varlen_plan`, and Triton kernels."""

    name = "flash"

    def __init__(self, num_multiprocessors: int, source: FlashSource, launcher: Launcher = launch) -> None:
        super().__init__(num_multiprocessors, launcher)
        self._num_multiprocessors = num_multiprocessors
        self.source = source

    @staticmethod
    def load() -> "FlashKernels":
        """The backend of the current GPU, with the fastest flash kernels that are available and correct. Raises
        RuntimeError, with the reasons, if there are none."""
        num_multiprocessors = count_multiprocessors()
        return fastest(num_multiprocessors, torch.device("cuda", torch.cuda.current_device()))

    def attend(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSV: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        """See `Backend`."""
        check_shapes(q_THD, k_KSD, v_KSV)
        found = self._rounds(reads, q_THD, k_KSD, v_KSV) if softcap is None else None
        if found is None:
            return super().attend(q_THD, k_KSD, v_KSV, reads, scale, softcap)
        k_SKD, v_SKD = k_KSD.transpose(0, 1), v_KSV.transpose(0, 1)
        parts = [self.source.kernel(q_THD, k_SKD, v_SKD, one, scale) for one in found.launches]
        for out_THD, lse_HT in parts:
            if lse_HT.shape != q_THD.shape[1::-1] or not lse_HT.is_contiguous():
                raise RuntimeError(f"{tuple(lse_HT.shape)} is no lse of queries {tuple(q_THD.shape)}")
            if out_THD.stride() != parts[0][0].stride():
                raise RuntimeError(f"outputs have strides {out_THD.stride()} and {parts[0][0].stride()}")
        self._propagate_nonfinite(found.pieces, k_KSD, q_THD, parts)
        rest = super().attend(q_THD, k_KSD, v_KSV, found.rest, scale) if found.rest else None
        return self._joined(found.members, q_THD, parts, rest)

    def _rounds(self, reads: Sequence[Read], q_THD: Tensor, k_KSD: Tensor, v_KSV: Tensor) -> DeviceRounds | None:
        """The part of some reads for flash kernels, computed once for all layers with the same pattern; None if there
        is none."""
        num_rows, num_heads, _ = q_THD.shape
        if num_rows < varlen_plan.MIN_ROWS or not varlen.can_take(q_THD, k_KSD, v_KSV, self.source.max_dim):
            return None
        reads = reads if isinstance(reads, Reads) else Reads(reads)
        needs_regular_shapes = self.source.needs_regular_shapes
        key = (q_THD.device, self._num_multiprocessors, num_rows, num_heads, needs_regular_shapes)
        if key not in reads.cache:
            plan = varlen_plan.plan(
                reads, num_heads, self._num_multiprocessors, needs_regular_shapes=needs_regular_shapes
            )
            reads.cache[key] = on_device(plan, num_rows, q_THD.device) if plan.rounds else None
        return reads.cache[key]

    def _propagate_nonfinite(
        self, pieces: Tensor, k_KSD: Tensor, q_THD: Tensor, parts: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        (num_rows, num_heads, _), (num_kv_heads, _, dim) = q_THD.shape, k_KSD.shape
        self._launch(
            propagate_nonfinite,
            (len(pieces), num_kv_heads),
            *(pieces, k_KSD, *four([lse for _, lse in parts]), num_rows, num_heads // num_kv_heads),
            *k_KSD.stride()[:2],
            **constants.propagate_nonfinite(dim),
        )

    def _joined(
        self, members: Tensor, q_THD: Tensor, parts: Sequence[tuple[Tensor, Tensor]], rest: Partial | None
    ) -> Partial:
        num_rows, num_heads, dim = q_THD.shape
        folded = empty_partial(num_rows, num_heads, dim, q_THD)
        other = folded if rest is None else rest
        chosen = constants.fold_rounds(dim, has_rest=rest is not None)
        self._launch(
            fold_rounds,
            (ceil_div(num_rows * num_heads, chosen["TILE_ROWS"]),),
            *(members, *four([out for out, _ in parts]), *four([lse for _, lse in parts])),
            *(other.out_THD, other.lse_TH, folded.out_THD, folded.lse_TH),
            *(num_rows, num_heads, *parts[0][0].stride()[:2]),
            **chosen,
        )
        return folded


def four(tensors: list[Tensor]) -> list[Tensor]:
    """Padded to the number of kernel arguments with the first tensor, which kernels do not read there."""
    return tensors + tensors[:1] * (varlen_plan.MAX_ROUNDS - len(tensors))


def on_device(plan: varlen_plan.VarlenPlan, num_rows: int, device: torch.device) -> DeviceRounds:
    """The tables of the kernels, in one asynchronous copy."""
    pieces = [number for piece in varlen_plan.pieces(plan.rounds) for number in piece]
    sequences = [varlen_plan.sequences(one, num_rows) for one in plan.rounds]
    lists = [pieces, varlen_plan.members(plan.rounds, num_rows), *(numbers for one in sequences for numbers in one)]
    # each starts at a multiple of 16 bytes, because Triton compiles another variant for unaligned addresses
    padded = [numbers + [0] * (-len(numbers) % 4) for numbers in lists]
    flat = torch.tensor([number for numbers in padded for number in numbers], dtype=torch.int32)
    there = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    parts = there.split([len(numbers) for numbers in padded])
    tables = [part[: len(numbers)] for part, numbers in zip(parts, lists, strict=True)]
    of_rounds = zip(plan.rounds, tables[2::3], tables[3::3], tables[4::3], strict=True)
    launches = [
        Launch(bounds, starts, lengths, one.max_rows, one.max_keys, one.is_causal, one.reads)
        for one, bounds, starts, lengths in of_rounds
    ]
    return DeviceRounds(launches, tables[0].view(-1, 5), tables[1], plan.rest)


def fastest(
    num_multiprocessors: int,
    device: torch.device,
    launcher: Launcher = launch,
    seconds: Callable[[FlashKernels, torch.device], float] | None = None,
) -> FlashKernels:
    """The backend with the fastest of `varlen.SOURCES` that is available and correct on a device, or the first of those
    that are about as fast. `seconds` measures them if there are several. Raises RuntimeError, with the reasons, if none
    is."""
    right, reasons = right_ones(num_multiprocessors, device, launcher)
    if not right:
        raise RuntimeError("no flash kernels: " + "; ".join(reasons))
    measure = seconds_of_a_chunk if seconds is None else seconds
    took = {name: measure(kernels, device) for name, kernels in right.items()} if len(right) > 1 else {}
    limit = ALIKE * min(took.values(), default=0.0)
    best = next(name for name in right if took.get(name, 0.0) <= limit)
    notes = [f"{name} took {human_rounded(took[name] / took[best], 2)} times as long" for name in took if name != best]
    notes += reasons
    log.info("flash kernels of prefill: %s%s", best, f" ({'; '.join(notes)})" if notes else "")
    return right[best]


def right_ones(
    num_multiprocessors: int, device: torch.device, launcher: Launcher = launch
) -> tuple[dict[str, FlashKernels], list[str]]:
    """Backends with the sources that are available and correct on a device, by name, and the reasons against the
    others."""
    right: dict[str, FlashKernels] = {}
    reasons: list[str] = []
    for name, source in varlen.SOURCES.items():
        try:
            kernels = FlashKernels(num_multiprocessors, source(), launcher)
            for dtype in varlen.TYPES:
                if wrong := what_is_wrong(kernels, device, dtype):
                    raise ArithmeticError(wrong)
        except Exception as error:  # a broken installation may raise anything
            reasons.append(f"{name}: {type(error).__name__}: {error}")
            continue
        right[name] = kernels
    return right, reasons


def seconds_of_a_chunk(kernels: FlashKernels, device: torch.device) -> float:
    """Seconds of the attention of a chunk after earlier tokens, the shortest of several calls, and a share of the time
    that the first call with another number of keys takes longer."""
    num_rows, (num_heads, num_kv_heads, dim) = CHUNK_ROWS, CHUNK_HEADS
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(*shape, dim, dtype=torch.bfloat16, device=device, generator=generator)
        for shape in ((num_rows, num_heads), *((num_kv_heads, max(CHUNK_PASTS) + num_rows),) * 2)
    )

    def durations(past: int) -> list[float]:
        reads = Reads([Read(0, num_rows, 0, past), Read(0, num_rows, past, past + num_rows, offset=0)])
        took: list[float] = []
        for _ in range(CHUNK_REPEATS):
            begin = time.perf_counter()
            kernels.attend(q, k, v, reads, dim**-0.5)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took.append(time.perf_counter() - begin)
        return took

    usual, other = (durations(past) for past in CHUNK_PASTS)  # the first one may compile for all numbers of keys
    return min(usual) + (other[0] - min(other)) / PLAN_USES


def what_is_wrong(kernels: FlashKernels, device: torch.device, dtype: torch.dtype) -> str | None:
    """Error description of a backend over reads for flash kernels: whole ones with unordered keys, a stretch shared by
    two reads, a diagonal. The last rows see nothing. In the second key head the rows of the diagonal see a key of score
    -inf."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((PROBE_ROWS, PROBE_HEADS), (2, PROBE_KEYS), (2, PROBE_KEYS))
    q, k, v = (torch.randn(*shape, PROBE_DIM, generator=generator).to(dtype) for shape in shapes)
    square = Read(100, 360, 2450, 2710, offset=0)
    reads = Reads([Read(0, 260, 1100, 2420), Read(260, 520, 0, 1100), Read(0, 260, 0, 1100), square])
    wanted = expected(q, k, v, reads)
    q, k, v = (tensor.to(device, copy=True) for tensor in (q, k, v))
    k[:, UNSEEN], v[:, UNSEEN], k[1, BROKEN, 0] = torch.nan, torch.nan, -torch.inf
    found = kernels.attend(q, k, v, reads, SCALE)
    out, lse = found.out_THD.cpu(), found.lse_TH.cpu()
    broken = slice(square.row_start, square.row_end), slice(PROBE_HEADS // 2, PROBE_HEADS)
    if not (out[broken].isnan().all() and lse[broken].isnan().all()):
        return "a key that is infinite does not show"
    wanted.out_THD[broken], wanted.lse_TH[broken] = torch.nan, torch.nan
    for name, numbers, right, most in (("out", out, wanted.out_THD, 1e-2), ("lse", lse, wanted.lse_TH, 1e-3)):
        if not torch.allclose(numbers.double(), right, rtol=0, atol=most, equal_nan=True):  # infinite where `right` is
            difference = float((numbers - right).nan_to_num(0).abs().max())
            return f"{name} is off by {human_rounded(difference, 2)}"
    return None


def expected(q_THD: Tensor, k_KSD: Tensor, v_KSD: Tensor, reads: Reads) -> Partial:
    """The partial in float64."""
    seen_TS = torch.zeros(PROBE_ROWS, PROBE_KEYS, dtype=torch.bool)
    for read in reads:
        rows, slots = slice(read.row_start, read.row_end), slice(read.slot_start, read.slot_end)
        seen_TS[rows, slots] = True
        if read.is_causal:
            seen_TS[rows, slots].tril_()
    return reference.attend(q_THD, k_KSD.transpose(0, 1), v_KSD.transpose(0, 1), seen_TS, SCALE)
