"""The algebra of partials, and kernels against the float64 reference and the energy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention import Partial, energy, merge, merge_all, reference
from longleaf.attention.kernels import CpuKernel, attend, cpu_flash, dense
from longleaf.attention.masks import QueryRun, Read, causal_reads, window_reads
from longleaf.attention.native import NativeDecode
from longleaf.runs import Extent

TOLERANCE = 2e-6
KERNELS = pytest.mark.parametrize(
    "kernel", [cpu_flash, dense, CpuKernel(NativeDecode.load())], ids=["flash", "dense", "native"]
)

sizes = st.integers(1, 5)
seeds = st.integers(0, 2**31)


def random_partial(generator, shape, *, scale=1.0, empty=()):
    out = torch.randn(*shape, generator=generator)
    lse = torch.randn(*shape[:2], generator=generator) * scale
    for row in empty:
        out[row % shape[0]], lse[row % shape[0]] = 0.0, float("-inf")
    return Partial(out, lse)


def assert_same(a: Partial, b: Partial, atol=TOLERANCE):
    torch.testing.assert_close(a.out_THD.double(), b.out_THD.double(), atol=atol, rtol=atol)
    torch.testing.assert_close(a.lse_TH.double(), b.lse_TH.double(), atol=atol, rtol=atol)


@settings(max_examples=60, deadline=None)
@given(seeds, sizes, sizes, sizes, st.sampled_from([1.0, 50.0, 1e4]), st.lists(st.integers(0, 4), max_size=3))
def test_merge_is_an_associative_commutative_monoid(seed, tokens, heads, dim, scale, empty):
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (random_partial(generator, (tokens, heads, dim), scale=scale, empty=empty) for _ in range(3))
    assert_same(merge(a, merge(b, c)), merge(merge(a, b), c))
    assert_same(merge(a, b), merge(b, a))
    assert_same(merge(a, Partial.identity(tokens, heads, dim)), a, atol=0)


def test_identity_with_identity_stays_identity():
    nothing = Partial.identity(2, 3, 4)
    for joined in (merge(nothing, nothing), merge_all(torch.zeros(5, 2, 3, 4), torch.full((5, 2, 3), float("-inf")))):
        assert_same(joined, nothing, atol=0)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 6), st.sampled_from([1.0, 1e4]))
def test_merging_in_one_go_equals_merging_one_by_one_in_float64(seed, num_partials, scale):
    generator = torch.Generator().manual_seed(seed)
    parts = [random_partial(generator, (3, 2, 4), scale=scale, empty=[i]) for i in range(num_partials)]
    expected = Partial(parts[0].out_THD.double(), parts[0].lse_TH.double())
    for part in parts[1:]:
        expected = merge(expected, Partial(part.out_THD.double(), part.lse_TH.double()))
    stacked = merge_all(torch.stack([p.out_THD for p in parts]), torch.stack([p.lse_TH for p in parts]))
    assert_same(stacked, expected)


@settings(max_examples=40, deadline=None)
@given(seeds, sizes, st.integers(1, 20), sizes, st.sampled_from([0.1, 1.0, 100.0]))
def test_attention_is_the_gradient_of_the_energy(seed, heads, num_keys, dim, scale):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, heads, dim, generator=generator) for n in (1, num_keys, num_keys))
    plain = reference.attend(q, k, v, torch.ones(1, num_keys, dtype=torch.bool), scale)
    assert_same(energy.attend(q[0], k, v, scale), plain, atol=1e-12)


@KERNELS
@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    past=st.integers(0, 70),
    num_queries=st.integers(1, 300),
    window=st.one_of(st.none(), st.integers(1, 40), st.integers(100, 200)),
    cuts=st.lists(st.integers(1, 360), max_size=4),
    group=st.integers(1, 4),
)
def test_kernels_agree_with_float64_however_the_keys_are_cut(kernel, seed, past, num_queries, window, cuts, group):
    generator = torch.Generator().manual_seed(seed)
    kv_heads, dim, total = 2, 8, past + num_queries
    q = torch.randn(num_queries, kv_heads * group, dim, generator=generator)
    k, v = (torch.randn(kv_heads, total, dim, generator=generator) for _ in range(2))
    query = QueryRun(past, total, 0)
    bounds = sorted({0, total, *(c for c in cuts if c < total)})
    reads = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        extent = Extent(low, high, low)
        reads += causal_reads(query, extent) if window is None else window_reads(query, extent, window)
    found = attend(q, k, v, reads, 0.3, kernel)
    distance = torch.arange(past, total)[:, None] - torch.arange(total)[None]
    mask = (distance >= 0) & (distance < (window or total + 1))
    assert_same(found, reference.attend(q, k.transpose(0, 1), v.transpose(0, 1), mask, 0.3))


@KERNELS
def test_rows_that_see_nothing_are_the_identity(kernel):
    q, k = torch.randn(3, 4, 8), torch.randn(2, 16, 8)
    nothing = Partial.identity(3, 4, 8)
    assert_same(attend(q, k, k, [], 1.0, kernel), nothing, atol=0)
    assert_same(attend(q, k, k, [Read(0, 3, 5, 5), Read(1, 1, 0, 4)], 1.0, kernel), nothing, atol=0)
    hidden = Read(0, 3, 0, 4, offset=-10)
    assert_same(attend(q, k, k, [hidden], 1.0, kernel), nothing, atol=0)


@KERNELS
def test_logits_of_ten_thousand_stay_finite(kernel):
    q, k = torch.randn(2, 2, 8), torch.randn(1, 40, 8)
    found = attend(q, k, k, [Read(0, 2, 0, 17), Read(0, 2, 17, 40)], 1e4, kernel)
    expected = reference.attend(q, k.transpose(0, 1), k.transpose(0, 1), torch.ones(2, 40, dtype=torch.bool), 1e4)
    torch.testing.assert_close(found.lse_TH.double(), expected.lse_TH, rtol=TOLERANCE, atol=0)
    assert found.out_THD.isfinite().all()


def test_shapes_that_do_not_fit_are_refused():
    q, k = torch.randn(3, 5, 8), torch.randn(2, 16, 8)
    with pytest.raises(ValueError, match="do not fit"):
        attend(q, k, k, [Read(0, 3, 0, 4)], 1.0, cpu_flash)


@pytest.mark.parametrize("dim", [8, 32, 64, 80, 128])
@pytest.mark.parametrize("num_keys", [1, 31, 32, 33, 1000])
def test_the_compiled_kernel_agrees_with_float64(dim, num_keys):
    native = NativeDecode.load()
    assert native is not None, "a C compiler is part of the development set-up"
    generator = torch.Generator().manual_seed(num_keys)
    q = torch.randn(2, 4, dim, generator=generator)
    k, v = (torch.randn(2, num_keys + 9, dim, generator=generator) for _ in range(2))
    read = Read(0, 2, 5, 5 + num_keys)
    found = attend(q, k, v, [read], 0.2, CpuKernel(native))
    seen = torch.ones(2, num_keys, dtype=torch.bool)
    keys, values = (t[:, 5 : 5 + num_keys].transpose(0, 1) for t in (k, v))
    assert_same(found, reference.attend(q, keys, values, seen, 0.2))


def test_the_compiled_kernel_is_exact_where_almost_all_weights_vanish():
    native = NativeDecode.load()
    assert native is not None, "a C compiler is part of the development set-up"
    generator = torch.Generator().manual_seed(0)
    q = (40 * torch.randn(2, 4, 64, generator=generator)).round()  # whole numbers: float32 holds the scores exactly
    k, v = (torch.randn(2, 5000, 64, generator=generator).round() for _ in range(2))
    found = attend(q, k, v, [Read(0, 2, 0, 5000)], 1.0, CpuKernel(native))
    expected = reference.attend(q, k.transpose(0, 1), v.transpose(0, 1), torch.ones(2, 5000, dtype=torch.bool), 1.0)
    assert (expected.lse_TH > 500).all(), "most weights are far below the smallest float32"
    assert_same(found, expected)


def test_without_a_compiler_torchs_kernel_serves(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert NativeDecode.load() is None


def test_loading_the_compiled_kernel_leaves_denormals_alone():
    tiny = torch.tensor([1e-40])
    assert NativeDecode.load() is not None
    assert (tiny + tiny).item() > 0
