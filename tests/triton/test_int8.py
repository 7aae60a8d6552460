"""The kernels over keys and values in 8 bits: they write the bits that torch's operations write, and attend to them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention.masks import Read, Reads
from longleaf.kernels import int8
from longleaf.kernels.gpu.backend import TritonKernels
from longleaf.kernels.gpu.device.int8 import KEYS_PTX, VALUES_PTX
from tests.support.attention.partials import assert_same, seeds
from tests.support.attention.rectangles import expected

HEADS, NUM_BLOCKS, SCALE = 2, 6, 0.4
KERNELS = TritonKernels(4)
INVALID = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
"""Warnings of NumPy, which computes the same result as the device."""


def tokens(seed, num_tokens, dim=16, dtype=torch.float32):
    """Keys and values [K, T, D]; some channels are far larger than others, one is zero, and tokens differ."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(HEADS, num_tokens, dim, generator=generator) for _ in range(2))
    channels = 10 ** torch.empty(HEADS, 1, dim).uniform_(-4, 4, generator=generator)
    channels[:, :, 0] = 0
    sizes = 10 ** torch.empty(HEADS, num_tokens, 1).uniform_(-2, 2, generator=generator)
    return (k * channels).to(dtype), (v * sizes).to(dtype)


def layer(block_size, dim=16):
    """Slots in which anything may lie, the same each time."""
    retained = int8.empty(HEADS, NUM_BLOCKS, block_size, dim)
    for tensor in retained[:4]:
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 13)
    return retained


def assert_same_bits(a, b):
    for found, wanted in zip(a[:4], b[:4], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=4, deadline=None)
@given(seed=seeds, block_size=st.sampled_from([1, 8, 12, 40]), data=st.data())
def test_what_is_written_is_the_same_to_the_bit(dtype, seed, block_size, data):
    slots = torch.cat([torch.arange(b * block_size, (b + 1) * block_size) for b in (4, 1, 2)])
    slots = slots[: data.draw(st.integers(1, len(slots)))]
    k, v = tokens(seed, len(slots), dtype=dtype)
    found, wanted = layer(block_size), layer(block_size)
    for low, high in ((0, len(slots) // 3), (len(slots) // 3, len(slots) // 2), (len(slots) // 2, len(slots))):
        order = torch.randperm(high - low, generator=torch.Generator().manual_seed(seed)) + low
        if low < high:
            KERNELS.store_int8(found, slots[order], k[:, order], v[:, order])
            int8.write(wanted, slots[order], k[:, order], v[:, order])
    assert_same_bits(found, wanted)


@INVALID
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_so_is_what_is_not_finite(broken, place):
    slots, found, wanted = torch.arange(5), layer(8), layer(8)
    both = tokens(0, 5)
    both[place][0, 3, 5] = broken
    KERNELS.store_int8(found, slots, *both)
    int8.write(wanted, slots, *both)
    assert_same_bits(found, wanted)


def test_tokens_that_another_rank_keeps_spoil_nothing():
    """They all go into one slot, whose block is unused."""
    slots = torch.tensor([40, 3, 40, 4, 40])
    k, v = tokens(0, 5)
    found, wanted = layer(8), layer(8)
    KERNELS.store_int8(found, slots, k, v)
    int8.write(wanted, slots, k, v)
    for tensor, other in zip(found[:4], wanted[:4], strict=True):
        size = tensor.shape[1] // NUM_BLOCKS
        assert torch.equal(tensor[:, : 5 * size], other[:, : 5 * size])


READS = [
    Read(0, 5, 3, 80),
    Read(0, 2, 83, 90),
    Read(1, 2, 90, 91),
    Read(2, 4, 95, 97, 0),
    Read(4, 5, 100, 150, 45, 9),
]


def check(block_size, dim, group, dtype, softcap=None, atol=5e-6):
    num_slots = NUM_BLOCKS * block_size
    reads = [read for read in READS if read.slot_end <= num_slots]
    retained = layer(block_size, dim)
    k, v = tokens(0, num_slots, dim)
    int8.write(retained, torch.arange(num_slots), k / k.abs().amax(), v / 100)
    q = torch.randn(6, HEADS * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = expected(q, *int8.read(retained, torch.arange(num_slots), torch.float32), reads, SCALE, softcap)
    found = KERNELS.attend_int8(q, retained, Reads(reads), SCALE, softcap)
    assert_same(found, wanted, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 5e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-3)])
@pytest.mark.parametrize(("block_size", "dim", "group"), [(128, 16, 1), (32, 64, 4), (20, 24, 3)])
def test_attention_is_exact_over_rounded_keys(block_size, dim, group, dtype, atol):
    """Blocks of many tiles of keys, blocks of one tile, and blocks whose ends are not ends of tiles."""
    check(block_size, dim, group, dtype, 5.0 if group == 4 else None, atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e4])
def test_queries_of_any_size_are_exact(dtype, size):
    """Queries are scaled before the conversion to float16, which can represent neither of these sizes; keys must be
    small enough for softmax to distinguish the scores.
    """
    retained, slots = layer(128), torch.arange(200)
    k, v = tokens(0, 200)
    int8.write(retained, slots, k / k.abs().amax() / max(size, 1.0), v / 100)
    q = (size * torch.randn(3, HEADS, 16, generator=torch.Generator().manual_seed(1))).to(dtype)
    reads = [Read(0, 3, 0, 200)]
    wanted = expected(q, *int8.read(retained, slots, torch.float32), reads, SCALE, None)
    assert_same(
        KERNELS.attend_int8(q, retained, Reads(reads), SCALE), wanted, atol=5e-6 if dtype == torch.float32 else 2e-3
    )


def test_values_of_zero_are_zero():
    retained, slots = layer(32), torch.arange(60)
    k, v = tokens(0, 60)
    int8.write(retained, slots, k, 0 * v)
    found = KERNELS.attend_int8(torch.zeros(1, HEADS, 16), retained, Reads([Read(0, 1, 0, 60)]), SCALE)
    assert not found.out_THD.any()
    torch.testing.assert_close(found.lse_TH, torch.full((1, HEADS), 60.0).log())


@pytest.mark.parametrize(("ptx", "plus"), [(KEYS_PTX, 0.5), (VALUES_PTX, 0.0)])
def test_the_assembly_makes_what_the_interpreter_makes(ptx, plus):
    """Line by line, for all pairs of two times 8 bits: Triton's interpreter knows no assembly."""
    pairs = np.arange(1 << 16, dtype=np.uint32)
    registers = {"$2": pairs | pairs[::-1] << 16}
    for line in ptx.value.splitlines()[2:-1]:
        name, target, *operands = line.strip(" ;").replace(",", "").split()
        registers[target] = INSTRUCTIONS[name](*(registers.get(o) if o in registers else int(o, 0) for o in operands))
    wanted = registers["$2"].view(np.int8).astype(np.float16).reshape(-1, 2) + plus
    found = np.stack([registers[name].view(np.float16) for name in ("$0", "$1")], axis=1)
    np.testing.assert_array_equal(found, wanted)


def lop3(a, b, c, table):
    """(a & b) ^ c is the only table that is known here."""
    assert table == 0xF0 & 0xCC ^ 0xAA
    return a & b ^ c


INSTRUCTIONS = {
    "mov.b32": np.uint32,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lop3,
    "sub.f16x2": lambda a, b: (a.view(np.float16) - np.full_like(a, b).view(np.float16)).view(np.uint32),
}


@INVALID
def test_a_token_that_was_not_finite_shows_to_those_that_see_it():
    retained, slots = layer(32), torch.arange(60)
    k, v = tokens(0, 60)
    k[0, 30, 3] = torch.inf
    int8.write(retained, slots, k.clamp(-9, torch.inf), v)
    reads = [Read(0, 2, 0, 30), Read(1, 3, 30, 60), Read(3, 4, 31, 60)]
    found = KERNELS.attend_int8(torch.randn(4, HEADS, 16), retained, Reads(reads), SCALE, None)
    assert found.out_THD.isfinite().all(dim=2).tolist() == [[True, True], [False, True], [False, True], [True, True]]
