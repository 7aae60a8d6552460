"""Keys of 16 bits: read as they are, computed with in float32, and rounded only after all partials are merged."""

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf import c_extension
from longleaf.attention import Partial, reference
from longleaf.attention.masks import QueryRun, Read, reads_within
from longleaf.kernels import int8
from longleaf.kernels.cpu import flash
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.kernels.cpu.decode import FLAGS, SOURCE, NativeDecode
from longleaf.kernels.dense import DenseBackend
from longleaf.merge import MERGES, PartialCodec
from longleaf.positions import AttentionSpan
from longleaf.runs import Extent
from tests.support.attention.dealt import cases, decode, prefill
from tests.support.attention.dense import visible
from tests.support.attention.largest import Largest
from tests.support.attention.partials import assert_same, seeds

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
KERNELS = {"compiled": NativeBackend(), "torch": flash.TorchFlashBackend(), "dense": DenseBackend()}
NUM_RANKS = 8


def layer(dtype, *, num_keys=512, num_rows=1, kv_heads=2, group=4, dim=64):
    """Queries [T, H, D], keys and values [K, S, D] of a type."""
    generator = torch.Generator().manual_seed(num_rows)
    shapes = ((num_rows, kv_heads * group, dim), (kv_heads, num_keys, dim), (kv_heads, num_keys, dim))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def differing(one: Partial, other: Partial, dtype) -> float:
    """Share of the elements that differ in the model's dtype."""
    return (one.out_THD.to(dtype) != other.out_THD.to(dtype)).float().mean().item()


def on_ranks(attend, q, reach, num_keys, num_ranks):
    """The merged partial of the last rows, with the keys dealt over ranks."""
    bounds = [num_keys * i // num_ranks for i in range(num_ranks + 1)]
    query = QueryRun(num_keys - len(q), num_keys, 0)
    extents = [Extent(low, high, low) for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
    parts = [attend(q, list(reads_within(query, extent, reach))) for extent in extents]
    wire = PartialCodec(DenseBackend())
    return wire.fold(torch.stack([wire.pack(part) for part in parts]))


@HALVES
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("num_rows", "reach"), [(1, AttentionSpan()), (160, AttentionSpan()), (160, AttentionSpan(window=100))]
)
def test_one_rank_or_eight_give_the_same_numbers(name, num_rows, reach, dtype):
    """Except one in 200, so near the edge between two numbers of its type that float32's rounding decides."""
    q, k, v = layer(dtype, num_rows=num_rows)

    def attend(q, reads):
        return KERNELS[name].attend(q, k, v, reads, 0.2)

    one, eight = (on_ranks(attend, q, reach, k.shape[1], n) for n in (1, NUM_RANKS))
    assert differing(one, eight, dtype) <= 0.005


@HALVES
@pytest.mark.parametrize("name", KERNELS)
def test_so_do_queries_of_16_bits_over_keys_of_8(name, dtype):
    q, k, v = layer(dtype, num_rows=8)
    retained, backend = int8.empty(2, 8, 64, 64), KERNELS[name]
    backend.store_int8(retained, torch.arange(512), k, v)

    def attend(q, reads):
        return backend.attend_int8(q, retained, reads, 0.2)

    one, eight = (on_ranks(attend, q, AttentionSpan(), 512, n) for n in (1, NUM_RANKS))
    assert differing(one, eight, dtype) <= 0.005
    assert_same(one, backend.attend_int8(q.float(), retained, [Read(0, 8, 0, 504), Read(0, 8, 504, 512, 0)], 0.2))


@HALVES
@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=25, deadline=None)
@given(
    seed=seeds,
    num_rows=st.integers(1, 20),
    num_keys=st.integers(1, 90),
    group=st.integers(1, 5),
    dim=st.sampled_from([8, 16, 24, 64]),
    window=st.sampled_from([None, 1, 30]),
    softcap=st.sampled_from([None, 3.0]),
)
def test_kernels_agree_with_float64_over_the_same_keys(
    name, dtype, seed, num_rows, num_keys, group, dim, window, softcap
):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_rows, 2 * group, dim, generator=generator)
    k, v = (torch.randn(2, num_rows + num_keys, dim, generator=generator).to(dtype) for _ in range(2))
    query, total = QueryRun(num_keys, num_keys + num_rows, 0), num_keys + num_rows
    reach = AttentionSpan(window=window)
    reads = list(reads_within(query, Extent(0, num_keys // 2, 0), reach)) if num_keys > 1 else []
    reads += reads_within(query, Extent(num_keys // 2, total, num_keys // 2), reach)
    mask = visible(range(num_keys, total), range(total), reach)
    for queries in (q, q.to(dtype)):  # of either type
        found = KERNELS[name].attend(queries, k, v, reads, 0.3, softcap)
        keys, values = (t.transpose(0, 1) for t in (k, v))
        # float32 scores near 10 are rounded by 1e-6, and so are weights; 16 bits would be off by 1e-3
        assert_same(found, reference.attend(queries, keys, values, mask, 0.3, softcap=softcap), atol=1e-5)


@pytest.mark.sampled(4)
@HALVES
@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("flags", [(), ("-march=x86-64",), ("-march=x86-64-v3", "-mno-f16c")], ids=str)
def test_the_compiled_kernel_reads_every_number_of_16_bits(dtype, num_rows, flags):
    """As a value: the row sees only one key."""
    if flags and platform.machine() != "x86_64":
        pytest.skip("these are processors without one instruction or another of x86-64")
    if "-march=x86-64-v3" in flags and (missing := {"avx2", "bmi2", "fma"} - set(c_extension._processor_features())):
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    kernel = NativeDecode(c_extension.load(SOURCE, (*FLAGS, *flags)))
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    v = numbers.view(64, -1, 64)
    q, k = torch.zeros(num_rows * v.shape[1], 64, 64), torch.zeros_like(v)
    reads = [Read(i * num_rows, (i + 1) * num_rows, i, i + 1) for i in range(v.shape[1])]
    found = kernel(q, k, v, reads, 1.0).out_THD.view(v.shape[1], num_rows, 64, 64).permute(1, 2, 0, 3)
    is_finite = v.isfinite()
    for row in found:
        assert torch.equal(row[is_finite], v[is_finite].float())
        assert not row[~is_finite].isfinite().any()


@HALVES
def test_no_more_keys_than_a_tile_are_brought_to_float32_at_once(dtype, monkeypatch):
    monkeypatch.setattr(flash, "WIDE_BYTES", 1 << 16)
    q, k, v = layer(dtype, num_rows=300, num_keys=4096)
    with Largest() as made:
        found = KERNELS["torch"].attend(q, k, v, [Read(0, 300, 0, 3700), Read(0, 300, 3796, 4096, 0)], 0.2)
    assert made.num_bytes <= max(1 << 16, 2 * found.out_THD.nbytes)
    monkeypatch.undo()
    assert_same(found, KERNELS["torch"].attend(q, k, v, [Read(0, 300, 0, 3700), Read(0, 300, 3796, 4096, 0)], 0.2))


@pytest.mark.parametrize("name", KERNELS)
def test_scores_beyond_the_largest_float16_are_seen_under_a_mask(name):
    q = torch.full((3, 1, 8), 200.0).half()
    k = torch.full((1, 9, 8), -200.0).half()  # scores are -320,000, and the lowest float16 is -65,504
    k[:, [0, 1, 7, 8]] *= -1  # of keys that no row sees, they are 320,000
    v = torch.arange(9.0).half()[None, :, None].expand(1, 9, 8).contiguous()
    found = KERNELS[name].attend(q, k, v, [Read(0, 3, 0, 9, offset=4, window=3)], 1.0)
    torch.testing.assert_close(found.out_THD[:, 0, 0], torch.tensor([3.0, 4.0, 5.0]), atol=0, rtol=0.01)


@HALVES
def test_partials_of_16_bits_cannot_be_made(dtype):
    out, lse = torch.zeros(1, 2, 8), torch.zeros(1, 2)
    with pytest.raises(TypeError, match="float32"):
        Partial(out.to(dtype), lse)
    with pytest.raises(TypeError, match="float32"):
        Partial(out, lse.to(dtype))


@pytest.mark.sampled(4)
@HALVES
@pytest.mark.parametrize("merge", sorted(MERGES))
@settings(max_examples=15, deadline=None)
@given(case=cases(most_new=20), way=st.sampled_from(["queries", "keys"]))
def test_a_step_gives_float32_over_keys_of_16_bits(merge, dtype, case, way):
    """Within float32's rounding of the float64 result for the same keys: no intermediate rounding."""
    wanted = case.expected(dtype=dtype)
    chunk, _ = prefill(case, way, merge, dtype=dtype)
    assert chunk.dtype == torch.float32
    torch.testing.assert_close(chunk.double(), wanted, atol=5e-6, rtol=5e-6)
    for rows in decode(case, merge, dtype=dtype):
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows.double(), wanted, atol=5e-6, rtol=5e-6)
