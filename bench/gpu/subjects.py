"""The calls of a case: a kernel over memory that is there, once for each of several sets of it.

Sets take turns, as layers do, so that no call finds its keys in the cache. Shape letters as in
`longleaf.kernels.backend`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.gpu.cases import (
    BLOCK_SIZE,
    DIM,
    GROUP,
    KEY_HEADS,
    LATENT,
    LATENT_GROUP,
    VALUES,
    Attend,
    KernelCase,
    Move,
    Prefill,
)
from bench.gpu.timing import Call
from longleaf.attention.masks import Read, Reads
from longleaf.attention.partial import Partial
from longleaf.kernels.backend import Backend, Int8Layer
from longleaf.runs import ceil_div

CACHE_BYTES = 512 << 20
"""Several times the cache of any device: all sets of a case hold at least so much."""
MAX_SETS = 16


class Subjects:
    """What kernels run on."""

    def __init__(self, backend: Backend, device: str) -> None:
        self._backend = backend
        self._device = device

    def calls(self, case: KernelCase) -> list[Call]:
        """A call for each set."""
        num_sets = min(MAX_SETS, ceil_div(CACHE_BYTES, self._num_bytes(case)))
        return [call for _ in range(num_sets) for call in self._call(case)]

    @staticmethod
    def _num_bytes(case: KernelCase) -> int:
        return Attend("bfloat16", case.past + case.num_rows).num_bytes if isinstance(case, Prefill) else case.num_bytes

    def _call(self, case: KernelCase) -> Iterator[Call]:
        match case:
            case Attend(keys="int8"):
                yield self._attend_int8(case)
            case Attend(keys="latent"):
                keys = self._drawn(1, case.num_keys, LATENT)
                q = self._drawn(case.num_rows, LATENT_GROUP, LATENT)
                yield self._attend(q, keys, keys[..., :VALUES], reads_of(case))
            case Attend():
                dtype = getattr(torch, case.keys)
                keys, values = (self._drawn(KEY_HEADS, case.num_keys, DIM, dtype=dtype) for _ in range(2))
                q = self._drawn(case.num_rows, KEY_HEADS * GROUP, DIM, dtype=dtype)
                yield self._attend(q, keys, values, reads_of(case))
            case Prefill():
                keys, values = (self._drawn(KEY_HEADS, case.past + case.num_rows, DIM) for _ in range(2))
                yield self._attend(self._drawn(case.num_rows, KEY_HEADS * GROUP, DIM), keys, values, reads_of(case))
            case Move():
                yield self._move(case)

    def _attend(self, q_THD: Tensor, k_KSD: Tensor, v_KSV: Tensor, reads: Reads) -> Call:
        scale = q_THD.shape[2] ** -0.5
        return lambda: self._backend.attend(q_THD, k_KSD, v_KSV, reads, scale)

    def _attend_int8(self, case: Attend) -> Call:
        q, retained, reads = (
            self._drawn(case.num_rows, KEY_HEADS * GROUP, DIM),
            self._kept(case.num_keys),
            reads_of(case),
        )
        return lambda: self._backend.attend_int8(q, retained, reads, DIM**-0.5)

    def _move(self, case: Move) -> Call:
        rows, backend = case.num_rows, self._backend
        if case.name.startswith("store"):
            k, v = (self._drawn(KEY_HEADS, rows, DIM) for _ in range(2))
            slots = torch.arange(rows, device=self._device)
            if case.name == "store_int8":
                retained = self._kept(ceil_div(rows, BLOCK_SIZE) * BLOCK_SIZE)
                return lambda: backend.store_int8(retained, slots, k, v)
            pools = [torch.empty_like(k) for _ in range(2)]
            return lambda: backend.store(pools, slots, (k, v))
        shape = (rows, KEY_HEADS * GROUP)
        partial = Partial(*(self._drawn(*size, dtype=torch.float32) for size in ((*shape, DIM), shape)))
        if case.name == "pack":
            return lambda: backend.pack(partial, torch.float32)
        packed = torch.stack([backend.pack(partial, torch.float32)] * case.num_partials)
        return lambda: backend.fold(packed)

    def _kept(self, num_slots: int) -> Int8Layer:
        """Keys and values in 8 bits: any bytes, with exponents and scales as numbers around 1 have them."""
        keys, values = (
            torch.randint(-128, 128, (KEY_HEADS, num_slots, DIM), dtype=torch.int8, device=self._device)
            for _ in range(2)
        )
        exponents = torch.full((KEY_HEADS, num_slots // BLOCK_SIZE, DIM), -6, dtype=torch.int8, device=self._device)
        scales = torch.full((KEY_HEADS, num_slots), 1 / 64, device=self._device)
        return Int8Layer(keys, values, exponents, scales, BLOCK_SIZE)

    def _drawn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=self._device)


def reads_of(case: Attend | Prefill) -> Reads:
    """What the rows of a case see."""
    if isinstance(case, Prefill):
        rows, past = case.num_rows, case.past
        return Reads([Read(0, rows, 0, past)] * bool(past) + [Read(0, rows, past, past + rows, offset=0)])
    if case.is_shared:
        return Reads([Read(0, case.num_rows, 0, case.num_keys)])
    share = case.num_keys // case.num_rows
    return Reads([Read(row, row + 1, row * share, (row + 1) * share) for row in range(case.num_rows)])
