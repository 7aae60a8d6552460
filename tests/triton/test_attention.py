"""The attention kernel over keys in a floating type against the float64 reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention.masks import Read, Reads
from longleaf.kernels.gpu import work_items
from longleaf.kernels.gpu.backend import TritonKernels
from longleaf.kernels.gpu.launch import launch
from tests.support.attention.partials import assert_same, seeds
from tests.support.attention.rectangles import expected, rectangles

NUM_SLOTS, SCALE = 420, 0.2
NAN = float("nan")
TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""16-bit weights are rounded to the type of the values, and out to nothing."""


def tensors(seed, num_rows, heads, dims, dtype=torch.float32, num_slots=NUM_SLOTS):
    """Queries [T, H, D], keys [K, S, D] and values [K, S, V]; where V < D these are the first dims of the keys."""
    generator, (num_kv_heads, group), (dim, value_dim) = torch.Generator().manual_seed(seed), heads, dims
    q, k, v = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in (
            (num_kv_heads * group, num_rows, dim),
            (num_kv_heads, num_slots, dim),
            (num_kv_heads, num_slots, value_dim),
        )
    )
    return q.transpose(0, 1), k, k[..., :value_dim] if value_dim < dim else v  # queries as models hand them over


def attend(q, k, v, reads, softcap=None, num_multiprocessors=4, num_programs=None):
    def on_other_programs(kernel, grid, *args, **constants):
        is_attention = kernel.fn.__name__.startswith("attend")
        launch(kernel, (num_programs,) if is_attention and num_programs else grid, *args, **constants)

    return TritonKernels(num_multiprocessors, on_other_programs).attend(q, k, v, Reads(reads), SCALE, softcap)


def check(q, k, v, reads, softcap=None, atol=None):
    """Checks that the partial is right, and that slots outside all reads are not loaded."""
    is_named = torch.zeros(k.shape[1], dtype=torch.bool)
    for read in reads:
        is_named[read.slot_start : read.slot_end] = True
    wanted = expected(q, k, v, reads, SCALE, softcap)
    for tensor in (k, v):
        tensor[:, ~is_named] = NAN
    assert_same(attend(q, k, v, reads, softcap), wanted, atol=atol or TOLERANCES[k.dtype])


MIXED = [
    Read(0, 5, 3, 303),  # a document that all see
    Read(0, 2, 310, 330),
    Read(0, 1, 331, 340),
    Read(1, 2, 340, 341),  # one key
    Read(2, 4, 345, 347, 0),  # a diagonal
    Read(4, 5, 350, 420, 65, 9),  # a band
]


@pytest.mark.parametrize(
    ("dim", "group", "dtype"),
    [
        *((64, 4, dtype) for dtype in TOLERANCES),
        *((128, 5, dtype) for dtype in TOLERANCES),
        (16, 1, torch.float32),
        (80, 1, torch.float32),
        (96, 3, torch.float16),
        (112, 2, torch.bfloat16),
        (192, 7, torch.bfloat16),
        (256, 20, torch.float16),
    ],
)
def test_the_kernel_agrees_with_float64(dtype, dim, group):
    softcap = 5.0 if group % 2 else None
    check(*tensors(dim, 6, (2, group), (dim, dim), dtype), MIXED, softcap)


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [((576, 512), torch.bfloat16), ((24, 16), torch.float16), ((21, 5), torch.float32), ((40, 32), torch.bfloat16)],
)
def test_latents_are_keys_whose_first_dims_are_the_values(dtype, dims):
    check(*tensors(0, 6, (1, 16), dims, dtype), MIXED, atol=2 * TOLERANCES[dtype])


@settings(max_examples=12, deadline=None)
@given(
    data=st.data(),
    seed=seeds,
    num_rows=st.integers(1, 40),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 5)),
    softcap=st.sampled_from([None, 1.5, 30.0]),
)
def test_any_rectangles_are_read(data, seed, num_rows, heads, softcap):
    check(*tensors(seed, num_rows, heads, (16, 16)), data.draw(rectangles(num_rows)), softcap)


def test_types_that_differ_meet_in_the_wider_one():
    q, k, v = tensors(0, 6, (2, 4), (32, 32), torch.bfloat16)
    check(q.float() * 1.001, k, v, MIXED, atol=TOLERANCES[torch.float32])


def test_values_have_a_width_of_their_own():
    q, k, _ = tensors(0, 6, (2, 4), (48, 48))
    check(q, k, tensors(1, 6, (2, 4), (24, 24))[2], MIXED)


def test_a_slice_of_gathered_keys_lies_with_strides():
    q, k, v = tensors(0, 6, (2, 4), (32, 32))
    both_SKC = torch.cat((k.transpose(0, 1), v.transpose(0, 1)), dim=-1)
    check(q, *both_SKC.transpose(0, 1).chunk(2, dim=-1), MIXED)


def test_rows_that_see_nothing_are_the_identity():
    q, k, v = tensors(0, 5, (1, 2), (16, 16))
    for reads in ([], [Read(0, 5, 7, 7), Read(3, 3, 0, 9)], [Read(0, 5, 0, 9, -20)], [Read(0, 5, 0, 9, 30, 4)]):
        found = attend(q, k, v, reads)
        assert not found.out_THD.any() and (found.lse_TH == -torch.inf).all()
    found = attend(q, k, v, [Read(1, 3, 0, 9, 0)])
    assert (found.lse_TH == -torch.inf).all(dim=1).tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_many_programs_run_changes_no_bit(dtype):
    q, k, v = tensors(0, 5, (1, 3), (16, 16), dtype)
    whole = attend(q, k, v, MIXED)
    for num_programs in (1, 3):
        found = attend(q, k, v, MIXED, num_programs=num_programs)
        assert torch.equal(found.out_THD, whole.out_THD) and torch.equal(found.lse_TH, whole.lse_TH)


@pytest.mark.parametrize("num_multiprocessors", [1, 2, 13, 400])
def test_keys_are_cut_into_any_number_of_pieces(monkeypatch, num_multiprocessors):
    monkeypatch.setattr(work_items, "MIN_PIECE", 1)
    monkeypatch.setattr("longleaf.kernels.gpu.constants.MAX_TILE_KEYS", 16)
    q, k, v = tensors(0, 5, (1, 3), (16, 16))
    assert_same(attend(q, k, v, MIXED, None, num_multiprocessors), expected(q, k, v, MIXED, SCALE), atol=5e-6)


def test_rows_of_more_than_a_tile_read_the_same_keys():
    q, k, v = tensors(0, 90, (1, 2), (16, 16), torch.float16)
    check(q, k, v, [Read(0, 90, 0, 40), Read(0, 90, 40, 130, 0), Read(0, 90, 200, 260, 20, 33)])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy computes the same as the device
@pytest.mark.parametrize("broken", [NAN, torch.inf, -torch.inf])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("place", ["key", "value", "query"])
def test_what_is_not_finite_shows_to_those_that_see_it_and_to_no_others(broken, softcap, place):
    q, k, v = (tensor.abs() for tensor in tensors(0, 4, (2, 2), (16, 16)))
    {"key": k[0, 50], "value": v[0, 50], "query": q[1, 1]}[place][3] = broken
    reads = [Read(0, 4, 0, 20), Read(1, 2, 20, 90), Read(2, 3, 90, 150), Read(3, 4, 60, 90)]
    is_sound = attend(q, k, v, reads, softcap).out_THD.isfinite().all(dim=2)
    unsound = [(1, 1)] if place == "query" else [(1, 0), (1, 1)]
    assert (~is_sound).nonzero().tolist() == [list(pair) for pair in unsound]


def test_a_key_is_weighed_right_however_far_below_the_best():
    q, k, v = torch.zeros(1, 1, 16), torch.zeros(1, 2, 16), torch.eye(2, 16)[None]
    q[..., 0] = 1 / SCALE
    for below in (0.0, 0.1, 1.0, 10.0, 50.0):
        k[0, 1, 0] = -below
        out = attend(q, k, v, [Read(0, 1, 0, 2)]).out_THD[0, 0]
        torch.testing.assert_close(out[1] / out[0], torch.tensor(-below).exp(), rtol=1e-5, atol=0)


def test_slots_lie_beyond_2_to_the_31_numbers():
    """Only the touched part of the memory is allocated."""
    q, k, _ = tensors(0, 2, (2, 2), (128, 128), torch.float16, num_slots=40)
    far = (1 << 24) + 77
    whole_KSD = torch.empty(far + 40, 2, 128, dtype=torch.float16).transpose(0, 1)
    whole_KSD[:, far:] = k
    reads = [Read(0, 2, 0, 40)]
    found = attend(q, whole_KSD, whole_KSD, [read._replace(slot_start=far, slot_end=far + 40) for read in reads])
    assert (far * whole_KSD.stride(1)) >> 32
    assert_same(found, expected(q, k, k, reads, SCALE), atol=TOLERANCES[torch.float16])


def test_heads_lie_beyond_2_to_the_31_numbers():
    q, k, _ = tensors(0, 2, (3, 2), (128, 128), torch.float16, num_slots=40)
    whole_KSD = torch.empty(3, (1 << 23) + 77, 128, dtype=torch.float16)
    whole_KSD[:, :40] = k
    reads = [Read(0, 2, 0, 40)]
    assert_same(attend(q, whole_KSD, whole_KSD, reads), expected(q, k, k, reads, SCALE), atol=TOLERANCES[torch.float16])
