"""The compiled decode kernel against the float64 reference."""

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf import c_extension
from longleaf.attention import reference
from longleaf.attention.masks import Read, Reads
from longleaf.kernels.backend import Int8Layer
from longleaf.kernels.cpu.decode import FLAGS, SOURCE, NativeDecode
from longleaf.positions import AttentionSpan
from tests.support.attention.dense import visible
from tests.support.attention.partials import assert_same, seeds, torch_threads


def native_kernel():
    return NativeDecode.load()


@pytest.mark.sampled(60)
@pytest.mark.parametrize("dim", [8, 32, 64, 80, 96, 128])
@pytest.mark.parametrize("num_keys", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("num_rows", [1, 3, 4, 9, 32])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
def test_the_compiled_kernel_agrees_with_float64(dim, num_keys, num_rows, softcap):
    generator = torch.Generator().manual_seed(num_keys)
    q = torch.randn(4, num_rows, dim, generator=generator).transpose(0, 1)  # as models hand it over
    k, v = (torch.randn(2, num_keys + 9, dim, generator=generator) for _ in range(2))
    assert native_kernel().can_run(q, k, v)
    found = native_kernel()(q, k, v, [Read(0, num_rows, 5, 5 + num_keys)], 0.2, softcap)
    seen = torch.ones(num_rows, num_keys, dtype=torch.bool)
    keys, values = (t[:, 5 : 5 + num_keys].transpose(0, 1) for t in (k, v))
    assert_same(found, reference.attend(q, keys, values, seen, 0.2, softcap=softcap))


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    seed=seeds,
    num_rows=st.integers(1, 40),
    group=st.integers(1, 5),
    cap=st.sampled_from([None, 3.0]),
    num_threads=st.integers(1, 5),
)
def test_the_compiled_kernel_reads_any_rectangles(data, seed, num_rows, group, cap, num_threads):
    generator, reads, slot = torch.Generator().manual_seed(seed), [], 0
    for _ in range(data.draw(st.integers(0, 6))):
        rows = sorted(data.draw(st.lists(st.integers(0, num_rows), min_size=2, max_size=2)))
        num_keys = data.draw(st.one_of(st.integers(0, 70), st.integers(300, 900)))
        offset = data.draw(st.one_of(st.none(), st.integers(-40, 90)))
        window = None if offset is None else data.draw(st.one_of(st.none(), st.integers(1, 60)))
        reads.append(Read(*rows, slot, slot + num_keys, offset, window))
        slot += num_keys
    seen = torch.zeros(num_rows, slot, dtype=torch.bool)
    for read in reads:
        query, key = torch.arange(read.row_end - read.row_start)[:, None], torch.arange(read.slot_end - read.slot_start)
        distance = (read.offset if read.offset is not None else slot) + query - key
        rectangle = (distance >= 0) & (distance < (read.window or slot + num_rows + 100))
        seen[read.row_start : read.row_end, read.slot_start : read.slot_end] = rectangle
    q = torch.randn(num_rows, 2 * group, 8, generator=generator)
    k, v = (torch.randn(2, slot, 8, generator=generator) for _ in range(2))
    expected = reference.attend(q, k.transpose(0, 1), v.transpose(0, 1), seen, 0.5, softcap=cap)
    with torch_threads(num_threads):
        found, again = (native_kernel()(q, k, v, Reads(reads), 0.5, cap) for _ in range(2))
    assert_same(found, expected)
    assert torch.equal(found.out_THD, again.out_THD) and torch.equal(found.lse_TH, again.lse_TH), (
        "in any order of the threads"
    )


def test_non_finite_number_in_one_part_of_the_keys_reaches_the_result():
    q, k = torch.randn(2, 2, 8), torch.randn(1, 5000, 8)
    with torch_threads(4):
        for place in (0, 1777, 4999):
            for number in ("nan", "inf"):
                keys, values = k.clone(), k.clone()
                keys[0, place, 3] = float(number)
                assert native_kernel()(q, keys, k, [Read(0, 2, 0, 5000)], 1.0).out_THD.isnan().all()
                values[0, place] = float(number)
                hidden = native_kernel()(q, k, values, [Read(0, 1, 0, 5000), Read(1, 2, 0, place)], 1.0)
                assert not hidden.out_THD[0].isfinite().any()
                assert hidden.out_THD[1].isfinite().all()


def test_the_compiled_kernel_keeps_what_is_broken_in_one_row_out_of_the_others():
    q, k = torch.randn(20, 2, 8), torch.randn(1, 90, 8)
    reads = [Read(0, 20, 0, 40), *(Read(i, i + 1, 40 + i, 60 + i) for i in range(20))]
    whole = native_kernel()(q, k, k, reads, 1.0)
    broken = q.clone()
    broken[7] = float("nan")
    found = native_kernel()(broken, k, k, reads, 1.0)
    assert found.out_THD[7].isnan().all()
    for a, b in ((found.rows(0, 7), whole.rows(0, 7)), (found.rows(8, 20), whole.rows(8, 20))):
        assert_same(a, b, atol=0)


ARCHITECTURES = {
    "x86-64": set(),
    "x86-64-v2": {"ssse3", "sse4_2", "popcnt"},
    "x86-64-v3": {"avx2", "bmi2", "fma", "f16c", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""Compiler targets of the kernel, and the processor features that they need."""


@pytest.mark.extended
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are x86-64 processors")
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=() if a == "x86-64" else pytest.mark.slow) for a in ARCHITECTURES],
)
def test_the_kernels_are_right_on_processors_of_any_age(architecture, tmp_path, monkeypatch):
    if missing := ARCHITECTURES[architecture] - set(c_extension._processor_features()):
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = [f"-march={architecture}" if flag == "-march=native" else flag for flag in FLAGS]
    decode = NativeDecode(c_extension.load(SOURCE, flags))
    generator = torch.Generator().manual_seed(0)
    for num_rows, dim, softcap in ((1, 64, None), (3, 40, 5.0), (9, 128, None), (40, 64, 5.0)):
        q = torch.randn(num_rows, 4, dim, generator=generator)
        k, v = (torch.randn(2, 200, dim, generator=generator) for _ in range(2))
        seen = visible(range(150, 150 + num_rows), range(200), AttentionSpan(window=120))
        found = decode(q, k, v, [Read(0, num_rows, 0, 200, 150, 120)], 0.2, softcap)
        assert_same(found, reference.attend(q, k.transpose(0, 1), v.transpose(0, 1), seen, 0.2, softcap=softcap))
        k[0, 140, 3] = float("-inf")
        found = decode(q, k, v, [Read(0, num_rows, 0, 200, 150, 120)], 0.2, softcap)
        assert found.out_THD[:, :2].isnan().all() and found.out_THD[:, 2:].isfinite().all()


def test_the_compiled_kernel_leaves_alone_what_lies_otherwise():
    decode = native_kernel()
    q_THD, k_KSD, v_SKD = torch.randn(1, 4, 8), torch.randn(2, 9, 8), torch.randn(9, 2, 8)
    assert decode.can_run(q_THD, k_KSD, k_KSD)
    assert not decode.can_run(q_THD, k_KSD, v_SKD.transpose(0, 1))
    assert not decode.can_run(q_THD, k_KSD, k_KSD[..., :5])
    assert not decode.can_run(q_THD.transpose(1, 2).contiguous().transpose(1, 2), k_KSD, k_KSD)
    assert not decode.can_run(q_THD[..., :7], k_KSD[..., :7].contiguous(), k_KSD[..., :7].contiguous())


def test_the_compiled_kernel_leaves_alone_what_is_of_other_types_or_elsewhere():
    decode = native_kernel()
    q, k = torch.randn(1, 4, 8), torch.randn(2, 9, 8)
    for keys in (k, k.bfloat16(), k.half()):
        assert all(decode.can_run(queries, keys, keys) for queries in (q, q.bfloat16(), q.half(), q.double()))
    assert not decode.can_run(q.int(), k, k)
    assert not decode.can_run(q, k.double(), k.double())
    assert not decode.can_run(q, k, k.bfloat16())
    assert not decode.can_run(q, k.half(), k.bfloat16())
    for place in range(3):
        elsewhere = [t.to("meta") if i == place else t for i, t in enumerate((q, k, k))]
        assert not decode.can_run(*elsewhere)


def test_so_it_does_with_keys_of_8_bits():
    decode, q = native_kernel(), torch.randn(1, 4, 8)
    small = [torch.ones(2, n, 8, dtype=torch.int8) for n in (9, 9, 3)]
    stored = Int8Layer(*small, torch.ones(2, 9), 3)
    assert decode.can_run_int8(q, stored) and decode.can_run_int8(q.half(), stored)
    assert not decode.can_run_int8(q.int(), stored) and not decode.can_run_int8(q.to("meta"), stored)
    for place in range(4):
        for other in (stored[place].to("meta"), stored[place].half(), stored[place].transpose(0, 1)):
            assert not decode.can_run_int8(q, stored._replace(**{stored._fields[place]: other}))


def test_the_compiled_kernel_is_exact_where_almost_all_weights_vanish():
    generator = torch.Generator().manual_seed(0)
    q = (40 * torch.randn(2, 4, 64, generator=generator)).round()  # whole numbers: float32 holds the scores exactly
    k, v = (torch.randn(2, 5000, 64, generator=generator).round() for _ in range(2))
    found = native_kernel()(q, k, v, [Read(0, 2, 0, 5000)], 1.0)
    expected = reference.attend(q, k.transpose(0, 1), v.transpose(0, 1), torch.ones(2, 5000, dtype=torch.bool), 1.0)
    assert (expected.lse_TH > 500).all(), "most weights are far below the smallest float32"
    assert_same(found, expected)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_the_compiled_kernel_weighs_keys_of_any_score_right(num_rows):
    below = torch.linspace(0, 50, 1001)  # one pair of keys each: the second is worth exp(-below) of the first
    q = torch.zeros(num_rows, 1, 8)
    q[..., 0] = 1
    k, v = torch.zeros(1, 2, 8), torch.eye(2, 8)[None]
    decode, found = native_kernel(), []
    for distance in below.tolist():
        k[0, 1, 0] = -distance
        out = decode(q, k, v, [Read(0, num_rows, 0, 2)], 1.0).out_THD[:, 0]
        found.append((out[:, 1] / out[:, 0]).double())
    expected = below.double().neg().exp()[:, None].expand(-1, num_rows)
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-6, atol=0)


def test_loading_the_compiled_kernel_leaves_denormals_alone():
    tiny = torch.tensor([1e-40])
    native_kernel()
    assert (tiny + tiny).item() > 0
