"""Numeric self-test of a backend on its device, run before the first step.

Shape letters as in `longleaf.kernels.backend`.
"""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.attention import packed, reference
from longleaf.attention.masks import Read, Reads, hidden
from longleaf.attention.partial import Partial, merge_all
from longleaf.formatting import human_rounded
from longleaf.kernels import int8
from longleaf.kernels.backend import Backend

NUM_SLOTS, BLOCK_SIZE = 64, 16
KEY_HEADS, GROUP, DIM = 2, 3, 64
LATENT, ROTARY = 512, 64
"""Latent sizes of real models, because the sizes select the kernel."""
FEW, MANY = 3, 180
"""Rows of a decode step, and of a chunk, for which different kernels may be used."""
CAP = 1.0
SEEN, UNSEEN = 7, 60
"""Slots with non-finite test data."""
TOLERANCE, COARSE_TOLERANCE = 1e-5, 1e-2
"""Error tolerances of attention. The second one is for 16-bit keys, where weights may be rounded to the type of the
keys."""


class ProbeCase(NamedTuple):
    """Device and parameters of a test. Tensors are drawn and compared on the CPU."""

    backend: Backend
    device: str
    dtype: torch.dtype
    """Of queries, keys and values."""
    generator: torch.Generator

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    @property
    def tolerance(self) -> float:
        return COARSE_TOLERANCE if self.dtype.itemsize == 2 else TOLERANCE

    def compare(self, what: str, found: Partial, wanted: Partial, tolerance: float) -> Iterator[str]:
        """Yields an error description if the partials differ by more than `tolerance`. A row must be the identity in
        both partials or in neither."""
        out, lse = found.out_THD.cpu() - wanted.out_THD, found.lse_TH.cpu() - wanted.lse_TH
        lse = lse.masked_fill((found.lse_TH.cpu() == -torch.inf) & (wanted.lse_TH == -torch.inf), 0.0)
        difference = torch.cat([out.flatten(), lse.flatten()]).abs().amax().item()
        if not difference <= tolerance:  # also catches NaN
            off, most = human_rounded(difference, 2), human_rounded(tolerance)
            yield f"{what} is off by {off}, where rounding explains {most}"


def probe(backend: Backend, device: str, dtype: torch.dtype) -> str | None:
    """Describes the first operation that gives wrong results on the device, for keys and values of `dtype`; None if all
    are correct. Exceptions of kernels propagate."""
    bench = ProbeCase(backend, device, dtype, torch.Generator().manual_seed(0))
    checks = (_attend, _attend_latents, _attend_broken, _store, _int8, _pack_and_fold)
    return next(chain.from_iterable(check(bench) for check in checks), None)


def _attend(bench: ProbeCase) -> Iterator[str]:
    for num_rows in (FEW, MANY):
        q, k, v = _drawn(bench, num_rows)
        for cap in (None, CAP):
            what = f"attend of {num_rows} rows" + (" with a soft cap" if cap else "")
            yield from _compare_with_reference(bench, what, q, k, v, _reads(num_rows), cap)
        nothing = Reads([Read(0, num_rows, 0, 8, offset=-num_rows)])
        yield from _compare_with_reference(bench, f"attend of {num_rows} rows that see nothing", q, k, v, nothing, None)


def _attend_latents(bench: ProbeCase) -> Iterator[str]:
    q, pool = bench.draw(FEW, KEY_HEADS * GROUP, LATENT + ROTARY), bench.draw(1, NUM_SLOTS, LATENT + ROTARY)
    yield from _compare_with_reference(bench, "attend over latents", q, pool, None, _reads(FEW), None)


def _attend_broken(bench: ProbeCase) -> Iterator[str]:
    """A NaN in a key of one head must reach the rows that see the key, and no others."""
    for num_rows in (FEW, MANY):
        q, k, v = _drawn(bench, num_rows)
        k[0, SEEN] = torch.nan
        there = [tensor.to(bench.device) for tensor in (q, k, v)]
        found = bench.backend.attend(there[0], there[1], there[2], _reads(num_rows), _scale(q)).lse_TH.cpu()
        if not found[:-1, :GROUP].isnan().all() or found[:, GROUP:].isnan().any():
            yield f"attend of {num_rows} rows does not show a key that is NaN to those who see it, and to no others"


def _drawn(bench: ProbeCase, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], keys and values [K, S, D]."""
    q = bench.draw(num_rows, KEY_HEADS * GROUP, DIM)
    return q, bench.draw(KEY_HEADS, NUM_SLOTS, DIM), bench.draw(KEY_HEADS, NUM_SLOTS, DIM)


def _scale(q_THD: Tensor) -> float:
    """A scale that gives scores around 2 for any dim."""
    return 2 * q_THD.shape[2] ** -0.5


def _reads(num_rows: int) -> Reads:
    """One read of each kind: full, banded, diagonal. The last row is in none of them."""
    last, square = num_rows - 1, min(num_rows - 1, 16)
    full, banded = Read(0, last, 0, 20), Read(0, last, 20, 40, offset=3, window=3)
    return Reads([full, banded, Read(0, square, 40, 40 + square, offset=0)])


def _seen(reads: Reads, num_rows: int) -> Tensor:
    """Mask of the slots that each row sees, bool [T, S]."""
    seen_TS = torch.zeros(num_rows, NUM_SLOTS, dtype=torch.bool)
    for read in reads:
        shape = (read.row_end - read.row_start, read.slot_end - read.slot_start)
        is_seen = torch.ones(shape, dtype=torch.bool)
        if read.offset is not None:
            is_seen = ~hidden(*shape, read.offset, read.window)
        seen_TS[read.row_start : read.row_end, read.slot_start : read.slot_end] |= is_seen
    return seen_TS


def _compare_with_reference(
    bench: ProbeCase, what: str, q_THD: Tensor, k_KSD: Tensor, v_KSD: Tensor | None, reads: Reads, cap: float | None
) -> Iterator[str]:
    """Compares attention with the reference. `v_KSD` is None if the values are part of the keys."""
    keys, values = (t.transpose(0, 1) for t in (k_KSD, k_KSD[..., :LATENT] if v_KSD is None else v_KSD))
    wanted = reference.attend(q_THD, keys, values, _seen(reads, len(q_THD)), _scale(q_THD), softcap=cap)
    q, k = q_THD.to(bench.device), k_KSD.to(bench.device, copy=True)
    v = k[..., :LATENT] if v_KSD is None else v_KSD.to(bench.device, copy=True)
    k[:, UNSEEN], v[:, UNSEEN] = torch.nan, torch.nan
    found = bench.backend.attend(q, k, v, reads, _scale(q), cap)
    yield from bench.compare(what, found, wanted, bench.tolerance)


def _store(bench: ProbeCase) -> Iterator[str]:
    slots = [3, UNSEEN, 0]
    tokens = [bench.draw(len(slots), KEY_HEADS, DIM).transpose(0, 1) for _ in range(2)]  # strided as in models
    before = torch.zeros(KEY_HEADS, NUM_SLOTS, DIM, dtype=bench.dtype)
    for num_pools in (2, 1):
        pools = [before.to(bench.device, copy=True) for _ in range(num_pools)]
        bench.backend.store(pools, torch.tensor(slots, device=bench.device), [t.to(bench.device) for t in tokens])
        for pool, stored in zip(pools, tokens, strict=False):
            wanted = before.clone()
            wanted[:, slots] = stored
            if not torch.equal(pool.cpu(), wanted):
                yield "store does not write its input to the given slots"


def _int8(bench: ProbeCase) -> Iterator[str]:
    """Stores keys in two steps. Later keys of the first block are larger than its first ones."""
    q, k, v = _drawn(bench, FEW)
    k[:, 5:9] *= 8
    retained = int8.empty(KEY_HEADS, NUM_SLOTS // BLOCK_SIZE, BLOCK_SIZE, DIM, bench.device)
    slots = torch.arange(NUM_SLOTS, device=bench.device)
    for part in (slice(0, 5), slice(5, NUM_SLOTS)):
        bench.backend.store_int8(retained, slots[part], k[:, part].to(bench.device), v[:, part].to(bench.device))
    keys, values = (t.cpu() for t in int8.read(retained, slots, torch.float32))
    largest = k.float().view(KEY_HEADS, -1, BLOCK_SIZE, DIM).abs().amax(dim=2).repeat_interleave(BLOCK_SIZE, 1)
    steps = ((keys - k).abs() / (largest / 128), (values - v).abs() / (v.float().abs().amax(2, keepdim=True) / 254))
    for name, step in zip(("keys", "values"), steps, strict=True):
        if not step.max() <= 1.001:
            yield f"store_int8 rounds {name} by {human_rounded(step.max().item(), 2)} times the rounding of 8 bits"
    reads, keys, values = _reads(FEW), keys.transpose(0, 1), values.transpose(0, 1)
    wanted = reference.attend(q, keys, values, _seen(reads, FEW), _scale(q), softcap=CAP)
    found = bench.backend.attend_int8(q.to(bench.device), retained, reads, _scale(q), CAP)
    yield from bench.compare("attend_int8", found, wanted, bench.tolerance)


def _pack_and_fold(bench: ProbeCase) -> Iterator[str]:
    """Merges three partials. One row is empty in all of them, another in one of them."""
    parts = [
        Partial(*(torch.randn(*shape, generator=bench.generator) for shape in ((FEW, 4, DIM), (FEW, 4))))
        for _ in range(3)
    ]
    for part, rows in zip(parts, (slice(0, 1), slice(0, 2), slice(0, 1)), strict=True):
        part.out_THD[rows], part.lse_TH[rows] = 0.0, -torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        there = [Partial(part.out_THD.to(bench.device), part.lse_TH.to(bench.device)) for part in parts]
        found = torch.stack([bench.backend.pack(part, dtype) for part in there])
        wanted = torch.stack([packed.pack(part, dtype) for part in parts])
        if found.dtype != dtype or not torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8)):
            yield f"pack to {str(dtype).removeprefix('torch.')} gives other numbers than it is given"
        stacked = packed.unpack(wanted)
        joined = merge_all(stacked.out_THD.double(), stacked.lse_TH.double())
        yield from bench.compare("fold", bench.backend.fold(found), joined, TOLERANCE)
