"""The kernels and sizes of `longleaf.kernels.gpu.tuning`, and the alternatives that `bench.gpu.variants` measures: in
the interpreter against float64, and compiled ahead of time."""

import os
import subprocess
import sys

import pytest
import torch

from bench.gpu import variants
from longleaf.attention.masks import Read, Reads
from longleaf.kernels import int8
from longleaf.kernels.gpu.backend import TritonKernels
from longleaf.kernels.gpu.constants import USUAL
from longleaf.kernels.gpu.tuning import HOPPER, Tile, Tuning, table_of
from tests.support.attention.partials import assert_same
from tests.support.attention.rectangles import expected
from tests.triton.test_attention import MIXED, NAN, SCALE, TOLERANCES, tensors

KERNELS = {
    "three products": Tile("unmasked", 16, 32, 4, 2, "tf32x3"),
    "more rows than an item": Tile("unmasked", 64, 32),
}


def attend(q, k, v, reads, tile, softcap=None, scale=SCALE):
    tuning = Tuning(dict.fromkeys((16, 32, 64, 128), tile))
    kernels = TritonKernels(4, tunings={(k.dtype, k.shape[2]): tuning})
    return kernels.attend(q, k, v, Reads(reads), scale, softcap)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("dim", "group"), [(16, 1), (21, 3), (32, 4)])
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_agrees_with_float64(name, dim, group, softcap):
    q, k, v = tensors(dim, 6, (2, group), (dim, dim))
    is_named = torch.zeros(k.shape[1], dtype=torch.bool)
    for read in MIXED:
        is_named[read.slot_start : read.slot_end] = True
    wanted = expected(q, k, v, MIXED, SCALE, softcap)
    for tensor in (k, v):
        tensor[:, ~is_named] = NAN
    assert_same(attend(q, k, v, MIXED, KERNELS[name], softcap), wanted, atol=TOLERANCES[torch.float32])


@pytest.mark.parametrize("window", [None, 33, 90])
def test_masks_of_many_rows_are_those_of_float64(window):
    """Some tiles are seen entirely by all rows, others by some."""
    q, k, v = tensors(0, 40, (1, 2), (16, 16))
    reads = [Read(0, 40, 5, 203, None if window is None else 260, window), Read(0, 40, 210, 250, 0, window)]
    found = attend(q, k, v, reads, Tile("unmasked", 64, 16))
    assert_same(found, expected(q, k, v, reads, SCALE), atol=TOLERANCES[torch.float32])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter
@pytest.mark.parametrize("broken", [NAN, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", KERNELS)
def test_a_row_that_sees_a_key_that_is_not_finite_is_nan(name, broken):
    q, k, v = (tensor.abs() for tensor in tensors(0, 4, (1, 2), (16, 16)))
    k[0, 50, 3] = broken
    found = attend(q, k, v, [Read(0, 2, 0, 200), Read(2, 4, 60, 200)], KERNELS[name])
    assert found.out_THD.isnan().flatten(1).all(dim=1).tolist() == [True, True, False, False]


def test_a_scale_that_is_not_positive_is_right():
    q, k, v = tensors(0, 40, (1, 2), (16, 16))
    reads = [Read(0, 40, 0, 200)]
    found = attend(q, k, v, reads, Tile("unmasked", 64, 16), scale=-SCALE)
    assert_same(found, expected(q, k, v, reads, -SCALE), atol=TOLERANCES[torch.float32])


def test_the_interpreter_runs_the_sizes_of_one_device():
    assert table_of(USUAL) is HOPPER and table_of(USUAL._replace(max_tile_rows=32)) == {}


@pytest.mark.parametrize("group", variants.GROUPS, ids=lambda group: group.name)
def test_a_group_has_one_default(group):
    names = [variants.name_of(variant) for variant in group.variants]
    assert len(set(names)) == len(names) and variants.default_of(group) in names


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("group", variants.GROUPS, ids=lambda group: group.name)
def test_the_benchmark_checks_a_variant(group, number, monkeypatch):
    monkeypatch.setattr(variants, "CHECKED_KEYS", 3200)
    monkeypatch.setattr("longleaf.kernels.gpu.backend.count_multiprocessors", lambda: 2)
    small = group._replace(cases=[group.cases[0]._replace(num_rows=min(group.cases[0].num_rows, 8))])
    row = variants.checked(small, number, "cpu")
    assert row["is_right"], row


COMPILING = """
from bench.occupancy.compiling import compile_variant
from bench.occupancy.targets import TARGETS
from longleaf.kernels.gpu import tuning, variants
target = TARGETS["sm_90"]
for (dtype, dim), tuned in tuning.HOPPER.items():
    for tile in tuned.tiles.values():
        used = compile_variant(variants.tuned(dtype, dim, tile), target)
        programs = target.occupancy(tile.num_warps, used.registers, used.shared)
        print(dtype, tile, used, programs, flush=True)
        assert programs >= 1 and used.spilled <= 64
"""


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_the_sizes_fit_into_a_multiprocessor():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILING], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_rows_that_share_keys_in_8_bits_are_in_one_item():
    """More rows than the usual item, with the sizes of another tile."""
    tiles = {16: Tile("items", 16, 32), 32: Tile("items", 32, 32)}
    kernels = TritonKernels(2, tunings={(torch.int8, 32): Tuning(tiles, 32)})
    q, k, v = tensors(0, 8, (1, 4), (32, 32))
    num_slots = k.shape[1] // 32 * 32
    slots, retained = torch.arange(num_slots), int8.empty(1, num_slots // 32, 32, 32, "cpu")
    kernels.store_int8(retained, slots, k[:, :num_slots], v[:, :num_slots])
    reads = Reads([Read(0, 8, 5, num_slots - 3)])
    found = kernels.attend_int8(q.to(torch.float16), retained, reads, SCALE)
    wanted = expected(q.to(torch.float16), *int8.read(retained, slots, torch.float32), reads, SCALE)
    assert_same(found, wanted, atol=4e-3)
    assert {work.tile_rows for work in reads.cache.values()} == {32}


def test_latents_of_many_rows_take_larger_tiles():
    kernels = TritonKernels(2, tunings={(torch.float32, 24): Tuning({32: Tile("items", 64, 32, 8, 2)}, 64)})
    q, k, _ = tensors(0, 3, (1, 8), (24, 16))
    reads = Reads([Read(0, 3, 5, k.shape[1] - 3)])
    found = kernels.attend(q, k, k[..., :16], reads, SCALE)
    assert_same(found, expected(q, k, k[..., :16], reads, SCALE), atol=TOLERANCES[torch.float32])
    assert {work.tile_rows for work in reads.cache.values()} == {32}
