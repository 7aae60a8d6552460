"""Attention on the device against float64."""

import torch
from torch import Tensor

from longleaf.attention.block_attribution import BLOCK, AttributedRead, BlockSums, attributed_read
from longleaf.attention.masks import Read, Reads
from longleaf.kernels import int8
from longleaf.kernels.probe import probe
from tests.gpu.place import (
    TOLERANCES,
    LeftOut,
    Place,
    assert_close,
    assert_same_bits,
    flash_on,
    scale_of,
    seen_through,
    wanted,
)

KEY_HEADS, BLOCK_SIZE = 2, 128
GROUPS = {64: 8, 80: 1, 96: 3, 112: 7, 128: 4, 192: 5, 256: 2}
CAP = 5.0
NAN = float("nan")


def mixed(place: Place) -> list[Read]:
    """A document that all rows see, their own tails, a diagonal, a band, one key, and rows that see nothing."""
    rows, keys = place.num_rows, place.num_keys
    own = keys * 3 // 4
    tail = (keys - own) // 8
    last = rows - 2
    reads = [Read(0, last, 7, own - 5)]
    reads += [Read(row, row + 1, own + row * tail, own + (row + 1) * tail - 3) for row in range(2)]
    reads.append(Read(2, 3, own + 2 * tail, own + 2 * tail + 1))
    square = min(last, tail)
    reads.append(Read(0, square, own + 3 * tail, own + 3 * tail + square, 0))
    reads.append(Read(0, last, own + 5 * tail, own + 6 * tail, tail, tail // 2))
    return reads


def tensors(place: Place, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D] as models hand them over, keys and values [K, S, D]."""
    group = GROUPS[dim]
    q = place.drawn(dim, KEY_HEADS * group, place.num_rows, dim, dtype=dtype).transpose(0, 1)
    k, v = (place.drawn(dim + i, KEY_HEADS, place.num_keys, dim, dtype=dtype) for i in (1, 2))
    return q, k, v


def spoil(k_KSD: Tensor, v_KSV: Tensor, reads: list[Read]) -> None:
    """NaN in all slots that no read names."""
    is_named = torch.zeros(k_KSD.shape[1], dtype=torch.bool, device=k_KSD.device)
    for read in reads:
        is_named[read.slot_start : read.slot_end] = True
    for tensor in (k_KSD, v_KSV):
        tensor.masked_fill_(~is_named[:, None], NAN)


def every_type_and_dim(place: Place) -> None:
    """Grouped heads of all dims, with and without a cap; slots that no row sees hold NaN."""
    reads = mixed(place)
    for dtype, tolerance in TOLERANCES.items():
        for dim in place.dims:
            for softcap in (None, CAP):
                q, k, v = tensors(place, dim, dtype)
                right = wanted(q, k, v, reads, softcap)
                spoil(k, v, reads)
                assert_close(place.kernels.attend(q, k, v, Reads(reads), scale_of(q), softcap), right, tolerance)


def few_rows(place: Place) -> None:
    """One query row: with one query head, and with several heads per key head."""
    for key_heads, group in ((1, 1), (1, 8), (8, 1), (4, 4)):
        q = place.drawn(1, 1, key_heads * group, 128, dtype=torch.bfloat16)
        k, v = (place.drawn(i, key_heads, place.num_keys, 128, dtype=torch.bfloat16) for i in (2, 3))
        reads = [Read(0, 1, 0, place.num_keys)]
        found = place.kernels.attend(q, k, v, Reads(reads), scale_of(q))
        assert_close(found, wanted(q, k, v, reads), TOLERANCES[torch.bfloat16])


def latents(place: Place) -> None:
    """Values that are the first dims of the keys."""
    for dtype, tolerance in TOLERANCES.items():
        q = place.drawn(0, place.num_rows, 16, 576, dtype=dtype)
        k = place.drawn(1, 1, place.num_keys, 576, dtype=dtype)
        reads = mixed(place)
        found = place.kernels.attend(q, k, k[..., :512], Reads(reads), scale_of(q))
        assert_close(found, wanted(q, k, k[..., :512], reads), 2 * tolerance)


def keys_in_8_bits(place: Place) -> None:
    """Keys and values in 8 bits give the attention of their dequantized values."""
    num_slots = place.num_keys // BLOCK_SIZE * BLOCK_SIZE
    slots = torch.arange(num_slots, device=place.device)
    reads = [read._replace(slot_end=min(read.slot_end, num_slots)) for read in mixed(place)]
    for dtype in TOLERANCES:
        # weights of both 16-bit types are float16
        tolerance = TOLERANCES[torch.float32 if dtype == torch.float32 else torch.float16]
        for dim in (64, 128):
            q, k, v = tensors(place, dim, dtype)
            retained = int8.empty(KEY_HEADS, num_slots // BLOCK_SIZE, BLOCK_SIZE, dim, place.device)
            place.kernels.store_int8(retained, slots, k[:, :num_slots], v[:, :num_slots])
            right = wanted(q, *int8.read(retained, slots, torch.float32), reads)
            assert_close(place.kernels.attend_int8(q, retained, Reads(reads), scale_of(q)), right, 2 * tolerance)


def blocks_are_attributed(place: Place) -> None:
    """Shares of blocks of keys; partials have the same bits as without attribution."""
    reads = mixed(place)
    for dtype in TOLERANCES:
        for dim in (64, 128):
            q, k, v = tensors(place, dim, dtype)
            plain, attributed = place.kernels.attend(q, k, v, Reads(reads), scale_of(q)), attributed_reads(reads)
            found = place.kernels.attend(q, k, v, attributed, scale_of(q))
            assert_same_bits(found.out_THD, plain.out_THD)
            assert_same_bits(found.lse_TH, plain.lse_TH)
            assert attributed.attributed is not None
            reported_KE2 = attributed.attributed.take()
            assert reported_KE2 is not None
            for read, each in zip(reads, attributed.attributed.reads, strict=True):
                reported_KRGE2 = reported_KE2[:, each.start * GROUPS[dim] : each.end * GROUPS[dim]]
                reported_KRGE2 = reported_KRGE2.unflatten(1, (-1, GROUPS[dim], each.num_entries)).double()
                check_shares(read, reported_KRGE2, q, k, found.lse_TH)


def attributed_reads(reads: list[Read]) -> Reads:
    """All rows of some reads are attributed."""
    found, reported = Reads(reads), list[AttributedRead]()
    for read in reads:
        reported.append(attributed_read(read[2:4], reported[-1].end if reported else 0, read[:2]))
    found.attributed = BlockSums(reported)
    return found


def check_shares(read: Read, reported_KRGE2: Tensor, q_THD: Tensor, k_KSD: Tensor, lse_TH: Tensor) -> None:
    """Compares the attribution of a read, [K, rows, G, entries, 2], in float64."""
    rows, slots = slice(read.row_start, read.row_end), slice(read.slot_start, read.slot_end)
    sizes, ends = (KEY_HEADS, -1), (read.slot_start % BLOCK, -read.slot_end % BLOCK)
    lse_KRG1 = lse_TH[rows].double().unflatten(1, sizes).transpose(0, 1)[..., None]
    q_RKGD = q_THD[rows].double().unflatten(1, sizes)
    scores_KRGS = torch.einsum("rkgd,ksd->krgs", q_RKGD, k_KSD[:, slots].double()) * scale_of(q_THD)
    seen_RS = seen_through([read], len(q_THD), k_KSD.shape[1], str(q_THD.device))[rows, slots]
    shares_KRGS = torch.where(seen_RS[:, None], (scores_KRGS - lse_KRG1).exp(), 0.0)
    right_KRGE = torch.nn.functional.pad(shares_KRGS, ends).unflatten(3, (-1, BLOCK)).sum(dim=4)
    peaks_KRGE, sums_KRGE = reported_KRGE2.unbind(dim=4)
    found_KRGE = torch.where(sums_KRGE == 0, 0.0, sums_KRGE * (peaks_KRGE - lse_KRG1).exp())
    torch.testing.assert_close(found_KRGE, right_KRGE, atol=1e-4, rtol=1e-3)


def many_rows(place: Place) -> None:
    """A chunk over a past and over itself, with a window and without."""
    rows = 16 * place.num_rows
    q = place.drawn(0, rows, 8, 64, dtype=torch.bfloat16)
    k, v = (place.drawn(i, 2, 2 * rows, 64, dtype=torch.bfloat16) for i in (1, 2))
    for window in (None, rows // 3):
        past = Read(0, rows, 0, rows, None if window is None else rows, window)
        reads = [past, Read(0, rows, rows, 2 * rows, 0, window)]
        found = place.kernels.attend(q, k, v, Reads(reads), scale_of(q))
        assert_close(found, wanted(q, k, v, reads), TOLERANCES[torch.bfloat16])


def many_rows_by_flash_kernels(place: Place) -> None:
    """The same chunks, and the self-test of a rank, with flash kernels where they apply."""
    there = flash_on(place)
    for dtype in (torch.float16, torch.bfloat16):
        complaint = probe(there.kernels, there.device, dtype)
        assert not complaint, f"{dtype}: {complaint}"
    many_rows(there)


def far_slots(place: Place) -> None:
    """A real pool in which keys lie beyond 2^31 numbers, within a head and from head to head."""
    place.needs_gpu()
    num_heads, num_slots, dim = 2, (1 << 24) + 4096, 128
    free, _ = torch.cuda.mem_get_info(place.device)
    if free < 3 * (size := num_heads * num_slots * dim * torch.bfloat16.itemsize):
        raise LeftOut(f"needs {3 * size / 2**30:.0f} GiB of free memory, and {free / 2**30:.0f} are there")
    k, v = (torch.full((num_heads, num_slots, dim), NAN, dtype=torch.bfloat16, device=place.device) for _ in range(2))
    assert k.stride(1) * num_slots >> 31 and k.numel() >> 32
    q, first = place.drawn(0, 3, 2 * num_heads, dim, dtype=torch.bfloat16), num_slots - 4000
    slots = torch.arange(first, num_slots, device=place.device)
    k_new, v_new = (place.drawn(i, num_heads, len(slots), dim, dtype=torch.bfloat16) for i in (1, 2))
    place.kernels.store((k, v), slots, (k_new, v_new))
    found = place.kernels.attend(q, k, v, Reads([Read(0, 3, first, num_slots)]), scale_of(q))
    assert_close(found, wanted(q, k_new, v_new, [Read(0, 3, 0, len(slots))]), TOLERANCES[torch.bfloat16])
