"""Storing, packing and folding on the device: the bits that torch's operations give on the CPU."""

import torch

from longleaf.attention import packed
from longleaf.attention.masks import Reads
from longleaf.attention.partial import Partial, merge_all
from longleaf.kernels import int8
from longleaf.kernels.probe import probe
from tests.gpu.attention import mixed, tensors
from tests.gpu.place import TOLERANCES, Place, assert_close, assert_same_bits, scale_of

HEADS, DIM, BLOCK_SIZE = 4, 128, 64


def probes(place: Place) -> None:
    """The self-test that a rank makes at its start, in every type."""
    place.needs_gpu()  # Triton's interpreter truncates where a GPU rounds to bfloat16
    for dtype in TOLERANCES:
        complaint = probe(place.kernels, place.device, dtype)
        assert not complaint, f"{dtype}: {complaint}"


def tokens_where_they_belong(place: Place) -> None:
    """Keys and values that are stored are those that were given."""
    for dtype in TOLERANCES:
        for num_pools in (2, 1):
            slots = torch.randperm(place.num_keys, generator=torch.Generator().manual_seed(0))[: place.num_keys // 2]
            tokens = [place.drawn(i, len(slots), HEADS, DIM, dtype=dtype).transpose(0, 1) for i in range(num_pools)]
            pools = [torch.zeros(HEADS, place.num_keys, DIM, dtype=dtype, device=place.device) for _ in tokens]
            place.kernels.store(pools, slots.to(place.device), tokens if num_pools == 2 else [tokens[0]] * 2)
            for pool, given in zip(pools, tokens, strict=True):
                right = torch.zeros(pool.shape, dtype=dtype).index_copy_(1, slots, given.cpu())
                assert_same_bits(pool, right)


def same_8_bits_as_the_cpu(place: Place) -> None:
    """Tokens that come in several goes, whose channels differ a lot, and grow."""
    num_slots = min(place.num_keys, 4096) // BLOCK_SIZE * BLOCK_SIZE
    for dtype in TOLERANCES:
        k, v = (place.drawn(i, HEADS, num_slots, DIM) for i in (1, 2))
        k = (k * 10 ** place.drawn(3, HEADS, 1, DIM).clamp(-2, 2)).to(dtype)
        v = v.to(dtype)
        retained, right = (
            int8.empty(HEADS, num_slots // BLOCK_SIZE, BLOCK_SIZE, DIM, d) for d in (place.device, "cpu")
        )
        for layer in (retained, right):
            for tensor in layer[:4]:
                tensor.zero_()
        for low, high in ((0, 3), (3, num_slots // 3), (num_slots // 3, num_slots)):
            slots = torch.arange(low, high)
            place.kernels.store_int8(retained, slots.to(place.device), k[:, low:high], v[:, low:high])
            int8.write(right, slots, k[:, low:high].cpu(), v[:, low:high].cpu())
        for found, wanted in zip(retained[:4], right[:4], strict=True):
            assert_same_bits(found, wanted)


def parts(place: Place, num_partials: int, num_rows: int) -> list[Partial]:
    """Partials, of which one row is empty in all of them and another in one."""
    made = [
        Partial(place.drawn(2 * i, num_rows, HEADS, DIM), 9 * place.drawn(2 * i + 1, num_rows, HEADS))
        for i in range(num_partials)
    ]
    for part, rows in zip(made, (slice(0, 2), *[slice(0, 1)] * num_partials), strict=False):
        part.out_THD[rows], part.lse_TH[rows] = 0.0, -torch.inf
    return made


def packed_bits(place: Place) -> None:
    """A packed partial has the same bits on every device. Triton's interpreter truncates where a GPU rounds."""
    for dtype in (torch.float32, torch.bfloat16) if place.is_gpu else (torch.float32,):
        for part in parts(place, 2, place.num_rows):
            found, on_cpu = place.kernels.pack(part, dtype), Partial(part.out_THD.cpu(), part.lse_TH.cpu())
            assert_same_bits(found, packed.pack(on_cpu, dtype))


def folds_to_the_same_bits(place: Place) -> None:
    """The fold is right, and gives a row the same bits each time, for any other rows beside it."""
    for dtype in (torch.float32, torch.bfloat16):
        stacked = torch.stack([place.kernels.pack(part, dtype) for part in parts(place, 5, place.num_rows)])
        found = place.kernels.fold(stacked)
        reported = packed.unpack(stacked)
        assert_close(found, merge_all(reported.out_THD.double(), reported.lse_TH.double()), 1e-5)
        for rows in (slice(0, 1), slice(1, place.num_rows), slice(0, place.num_rows)):
            again = place.kernels.fold(stacked[:, rows].contiguous())
            assert_same_bits(again.out_THD, found.out_THD[rows])
            assert_same_bits(again.lse_TH, found.lse_TH[rows])


def attends_to_the_same_bits(place: Place) -> None:
    """Attention of the same rows over the same reads gives the same bits, run after run."""
    q, k, v = tensors(place, 128, torch.bfloat16)
    once, *more = (place.kernels.attend(q, k, v, Reads(mixed(place)), scale_of(q)) for _ in range(5))
    for other in more:
        assert_same_bits(other.out_THD, once.out_THD)
        assert_same_bits(other.lse_TH, once.lse_TH)
