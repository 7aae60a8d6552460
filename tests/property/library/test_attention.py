"""The algebra of partials, and kernels against the float64 reference and the energy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention import Partial, add_sink, merge, merge_all, reference
from longleaf.attention.masks import QueryRun, Read, causal_reads, reads_within
from longleaf.kernels import dense
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.kernels.cpu.flash import TorchFlashBackend
from longleaf.kernels.cpu.fold import NativeFold
from longleaf.runs import Extent
from tests.support.attention import energy
from tests.support.attention.dense import reaches, visible
from tests.support.attention.partials import TOLERANCE, assert_same, seeds

BACKENDS = [NativeBackend(), TorchFlashBackend(), dense.DenseBackend()]
KERNELS = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)

sizes = st.integers(1, 5)


def random_partial(generator, shape, *, scale=1.0, centre=0.0, empty=(), dtype=torch.float32):
    out = torch.randn(*shape, generator=generator, dtype=dtype)
    lse = centre + torch.randn(*shape[:2], generator=generator, dtype=dtype) * scale
    for row in empty:
        out[row % shape[0]], lse[row % shape[0]] = 0.0, float("-inf")
    return Partial(out, lse)


def double(part: Partial) -> Partial:
    return Partial(part.out_THD.double(), part.lse_TH.double())


@settings(max_examples=60, deadline=None)
@given(seeds, sizes, sizes, sizes, st.sampled_from([1.0, 50.0, 1e4]), st.lists(st.integers(0, 4), max_size=3))
def test_merge_is_an_associative_commutative_monoid(seed, tokens, heads, dim, scale, empty):
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, heads, dim)
    a, b, c = (random_partial(generator, shape, scale=scale, empty=empty, dtype=torch.float64) for _ in range(3))
    assert_same(merge(a, merge(b, c)), merge(merge(a, b), c), atol=1e-10)
    assert_same(merge(a, b), merge(b, a), atol=0)
    assert_same(merge(a, Partial.identity(*shape, dtype=torch.float64)), a, atol=0)


def test_identity_with_identity_stays_identity():
    nothing = Partial.identity(2, 3, 4)
    for joined in (merge(nothing, nothing), merge_all(torch.zeros(5, 2, 3, 4), torch.full((5, 2, 3), float("-inf")))):
        assert_same(joined, nothing, atol=0)


@settings(max_examples=100, deadline=None)
@given(
    seeds, st.integers(2, 6), st.sampled_from([0.0, 30.0, -100.0, 1e4, -1e4]), st.sampled_from([1e-3, 1.0, 50.0, 1e4])
)
def test_merging_in_float32_agrees_with_float64_however_large_the_logits(seed, num_partials, centre, scale):
    generator = torch.Generator().manual_seed(seed)
    shape = (8, 2, 4)
    parts = [random_partial(generator, shape, scale=scale, centre=centre, empty=[i]) for i in range(num_partials)]
    exact, chain = double(parts[0]), parts[0]
    for i, part in enumerate(parts[1:]):
        exact, chain = merge(exact, double(part)), merge(chain, part)
        if i == 0:
            assert_same(chain, exact)
    assert_same(merge_all(torch.stack([p.out_THD for p in parts]), torch.stack([p.lse_TH for p in parts])), exact)
    sink_H = torch.full(shape[1:2], centre)
    assert_same(add_sink(parts[0], sink_H), add_sink(double(parts[0]), sink_H))
    rounding = max(p.lse_TH[p.lse_TH.isfinite()].abs().max().item() for p in parts) * 2**-24
    largest = max(p.out_THD.abs().max().item() for p in parts)
    assert_same(chain, exact, atol=TOLERANCE + num_partials * rounding * largest)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 9), st.sampled_from([1, 5, 8, 128]), st.sampled_from([1.0, 50.0, 1e4]), st.booleans())
def test_the_compiled_fold_agrees_with_float64(seed, num_partials, dim, scale, has_empty_row):
    fold = NativeFold.load()
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(num_partials, 3, 2, dim + 1, generator=generator)
    packed[..., -1] *= scale
    for empty in (packed[seed % num_partials, :2], packed[:, 2] if has_empty_row else packed[0, 0]):
        empty.zero_()[..., -1] = float("-inf")
    assert fold.can_run(packed)
    wide = packed.double()
    assert_same(fold(packed), merge_all(wide[..., :-1], wide[..., -1]))


def test_the_compiled_fold_hides_no_broken_number():
    fold = NativeFold.load()
    packed = torch.zeros(3, 1, 2, 5)
    packed[..., -1] = float("-inf")
    packed[1, 0, 0, -1] = float("nan")
    found = fold(packed)
    assert found.lse_TH[0, 0].isnan() and found.out_THD[0, 0].isnan().all()
    assert_same(Partial(found.out_THD[:, 1:], found.lse_TH[:, 1:]), Partial.identity(1, 1, 4), atol=0)


def random_attention(seed, heads=2, group=2, num_queries=3, num_keys=9, dim=3):
    """Queries, keys, values of another dim, and a mask; some queries may see nothing."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_queries, heads * group, dim, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(num_keys, heads, d, generator=generator, dtype=torch.float64) for d in (dim, dim + 2))
    return q, k, v, torch.rand(num_queries, num_keys, generator=generator) < 0.6, generator


@settings(max_examples=40, deadline=None)
@given(seeds, sizes, sizes, sizes, st.integers(0, 20), sizes, st.sampled_from([0.1, 1.0, 100.0]))
def test_attention_is_the_gradient_of_the_energy(seed, heads, group, num_queries, num_keys, dim, scale):
    q, k, v, mask, _ = random_attention(seed, heads, group, num_queries, num_keys, dim)
    assert_same(energy.attend(q, k, v, mask, scale), reference.attend(q, k, v, mask, scale), atol=1e-12)


@KERNELS
@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(0, 40), st.integers(1, 40), st.integers(1, 4), st.integers(1, 80))
def test_kernels_compute_the_gradient_of_the_causal_energy(backend, seed, past, num_queries, group, cut):
    total = past + num_queries
    q, k, v, _, _ = random_attention(seed, 2, group, num_queries, total, dim=8)
    q, k, v = (t[..., :8].float() for t in (q, k, v))
    extents = [Extent(low, high, low) for low, high in ((0, min(cut, total)), (cut, total)) if low < high]
    reads = [read for extent in extents for read in causal_reads(QueryRun(past, total, 0), extent)]
    found = backend.attend(q, k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous(), reads, 0.3)
    causal = torch.arange(past, total)[:, None] >= torch.arange(total)
    assert_same(found, energy.attend(q, k, v, causal, 0.3))


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_energies_of_parts_join_by_logaddexp_and_their_gradients_by_merge(seed):
    q, k, v, mask, generator = random_attention(seed)
    is_first = torch.rand(mask.shape[1], generator=generator) < 0.5
    parts = (mask & is_first, mask & ~is_first)
    zeta = torch.randn(*q.shape[:2], v.shape[2], generator=generator, dtype=torch.float64)
    joined = torch.logaddexp(*(energy.energy(q, k, v, part, zeta, 0.7) for part in parts))
    torch.testing.assert_close(joined, energy.energy(q, k, v, mask, zeta, 0.7), atol=1e-12, rtol=0)
    gradient = merge(*(energy.attend(q, k, v, part, 0.7) for part in parts))
    assert_same(gradient, energy.attend(q, k, v, mask, 0.7), atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from([-1e4, -3.0, 700.0, 1e4]))
def test_shifting_the_scores_moves_the_energy_and_leaves_its_gradient(seed, shift):
    q, k, v, mask, _ = random_attention(seed)
    plain = energy.attend(q, k, v, mask, 1.0)
    one, constant = torch.ones(*q.shape[:2], 1), torch.full((*k.shape[:2], 1), shift)
    shifted = energy.attend(torch.cat([q, one], -1), torch.cat([k, constant], -1), v, mask, 1.0)
    assert_same(shifted, Partial(plain.out_THD, plain.lse_TH + shift), atol=1e-10)


def test_the_second_derivative_of_the_energy_is_the_covariance_of_the_values():
    q, k, v, _, _ = random_attention(0, heads=1, group=1, num_queries=1)
    mask = torch.ones(1, len(k), dtype=torch.bool)
    zeta = torch.zeros(1, 1, v.shape[2], dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda z: energy.energy(q, k, v, mask, z, 1.0).sum(), zeta)
    weight_S = torch.softmax(k[:, 0] @ q[0, 0], dim=0)
    covariance_DD = torch.cov(v[:, 0].T, aweights=weight_S, correction=0)
    torch.testing.assert_close(hessian.squeeze(), covariance_DD, atol=1e-12, rtol=0)


@KERNELS
@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    past=st.integers(0, 70),
    num_queries=st.integers(1, 300),
    reach=st.one_of(reaches(), reaches(100, 200)),
    cuts=st.lists(st.integers(1, 360), max_size=4),
    group=st.integers(1, 4),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    value_dim=st.sampled_from([8, 8, 3, 11]),
    is_latent=st.booleans(),
)
def test_kernels_agree_with_float64_however_the_keys_are_cut(
    backend, seed, past, num_queries, reach, cuts, group, softcap, value_dim, is_latent
):
    generator = torch.Generator().manual_seed(seed)
    kv_heads, dim, total = 2, 8, past + num_queries
    q = torch.randn(num_queries, kv_heads * group, dim, generator=generator)
    k, v = (torch.randn(kv_heads, total, d, generator=generator) for d in (dim, value_dim))
    v = k[..., :value_dim] if is_latent else v
    query = QueryRun(past, total, 0)
    bounds = sorted({0, total, *(c for c in cuts if c < total)})
    reads = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        extent = Extent(low, high, low)
        reads += reads_within(query, extent, reach)
    found = backend.attend(q, k, v, reads, 0.3, softcap)
    mask = visible(range(past, total), range(total), reach)
    assert_same(found, reference.attend(q, k.transpose(0, 1), v.transpose(0, 1), mask, 0.3, softcap=softcap))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("tile_keys", [1, 7, 64])
@pytest.mark.parametrize("tile_scores", [1, 200, 5000])
@pytest.mark.parametrize("window", [None, 1, 9, 50])
def test_tiles_of_the_dense_kernel_do_not_show(monkeypatch, tile_keys, tile_scores, window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, generator=generator) for shape in ((40, 4, 8), (2, 70, 8), (2, 70, 8)))
    reads = [Read(0, 40, 0, 70, offset=30, window=window), Read(3, 17, 5, 61), Read(0, 9, 0, 20, offset=-5)]
    for read in reads:
        monkeypatch.undo()
        whole = dense.DenseBackend().attend(q, k, v, [read], 0.3, 2.0)
        monkeypatch.setattr(dense, "TILE_KEYS", tile_keys)
        monkeypatch.setattr(dense, "TILE_SCORES", tile_scores)
        assert_same(dense.DenseBackend().attend(q, k, v, [read], 0.3, 2.0), whole)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(0, 12), st.integers(0, 12), st.sampled_from([1.0, 100.0]))
def test_a_sink_is_one_more_key_without_a_value(seed, cut, num_keys, scale):
    generator = torch.Generator().manual_seed(seed)
    q, sink_H = torch.randn(3, 4, 8, generator=generator), scale * torch.randn(4, generator=generator)
    k, v = (torch.randn(num_keys, 4, 8, generator=generator) for _ in range(2))
    seen, cut = torch.ones(3, num_keys, dtype=torch.bool), min(cut, num_keys)
    whole = reference.attend(q, k, v, seen, scale, sink_H=sink_H)
    a = reference.attend(q, k[:cut], v[:cut], seen[:, :cut], scale)
    b = reference.attend(q, k[cut:], v[cut:], seen[:, cut:], scale)
    for joined in (merge(add_sink(a, sink_H), b), merge(a, add_sink(b, sink_H)), add_sink(merge(a, b), sink_H)):
        assert_same(joined, whole, atol=1e-12)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_see_nothing_are_the_identity(backend, dtype):
    q, k = torch.randn(3, 4, 8).to(dtype), torch.randn(2, 16, 8).to(dtype)
    nothing = Partial.identity(3, 4, 8)
    assert_same(backend.attend(q, k, k, [], 1.0), nothing, atol=0)
    assert_same(backend.attend(q, k, k, [Read(0, 3, 5, 5), Read(1, 1, 0, 4)], 1.0), nothing, atol=0)
    hidden = Read(0, 3, 0, 4, offset=-10)
    assert_same(backend.attend(q, k, k, [hidden], 1.0), nothing, atol=0)


@KERNELS
def test_logits_of_ten_thousand_stay_finite(backend):
    q, k = torch.randn(2, 2, 8), torch.randn(1, 40, 8)
    found = backend.attend(q, k, k, [Read(0, 2, 0, 17), Read(0, 2, 17, 40)], 1e4)
    expected = reference.attend(q, k.transpose(0, 1), k.transpose(0, 1), torch.ones(2, 40, dtype=torch.bool), 1e4)
    torch.testing.assert_close(found.lse_TH.double(), expected.lse_TH, rtol=TOLERANCE, atol=0)
    assert found.out_THD.isfinite().all()


def is_broken(part: Partial) -> torch.Tensor:
    """Rows and heads [T, H] with non-finite values."""
    return ~(part.out_THD.isfinite().all(dim=-1) & part.lse_TH.isfinite())


@pytest.mark.sampled(10)
@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["query", "key", "value"])
@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    past=st.integers(0, 70),
    num_queries=st.one_of(st.integers(1, 4), st.integers(1, 100)),
    reach=reaches(),
    broken=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    softcap=st.sampled_from([None, None, 5.0]),
    place=st.floats(0, 1, exclude_max=True),
)
def test_what_is_not_finite_shows_in_each_row_that_sees_it(
    backend, dtype, what, seed, past, num_queries, reach, broken, softcap, place
):
    generator, total = torch.Generator().manual_seed(seed), past + num_queries
    q = torch.randn(num_queries, 4, 8, generator=generator).to(dtype)
    k, v = (torch.randn(2, total, 8, generator=generator).to(dtype) for _ in range(2))
    reads = list(reads_within(QueryRun(past, total, 0), Extent(0, total, 0), reach))
    if what == "query":
        row = int(place * num_queries)
        q[row, 1, 3] = broken
        shows = torch.zeros(num_queries, 4, dtype=torch.bool)
        shows[row, 1] = True
        assert torch.equal(is_broken(backend.attend(q, k, v, reads, 0.3, softcap)), shows)
        return
    slot = int(place * total)
    (k if what == "key" else v)[0, slot, 3] = broken
    found = is_broken(backend.attend(q, k, v, reads, 0.3, softcap))
    sees = visible(range(past, total), range(total), reach)[:, slot]
    assert found[sees, :2].all()
    assert not found[:, 2:].any(), "the other key head is sound"


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_joining_hides_nothing_that_is_not_finite(broken):
    sound = random_partial(torch.Generator().manual_seed(0), (2, 3, 4), empty=[1])
    for field in ("out_THD", "lse_TH"):
        other = random_partial(torch.Generator().manual_seed(1), (2, 3, 4))
        if not (field == "lse_TH" and broken < 0):  # an lse of -inf is that of the identity
            getattr(other, field)[:, 1] = broken
            stacked = torch.stack([sound.out_THD, other.out_THD]), torch.stack([sound.lse_TH, other.lse_TH])
            packed = torch.cat([stacked[0], stacked[1][..., None]], dim=-1)
            sink_H = torch.zeros(3)
            for joined in (
                merge(sound, other),
                merge(other, sound),
                merge_all(*stacked),
                NativeFold.load()(packed),
                add_sink(other, sink_H),
            ):
                assert torch.equal(is_broken(joined), torch.tensor([[False, True, False]] * 2))


@KERNELS
def test_shapes_that_do_not_fit_are_refused(backend):
    q, k = torch.randn(3, 5, 8), torch.randn(2, 16, 8)
    with pytest.raises(ValueError, match="do not fit"):
        backend.attend(q, k, k, [Read(0, 3, 0, 4)], 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        backend.attend(q[:, :4], k, k[:, 1:], [Read(0, 3, 0, 4)], 1.0)
