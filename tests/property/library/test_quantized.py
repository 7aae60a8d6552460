"""Keys and values in 8 bits: how far they are off, and that attention over them is exact."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.attention import reference
from longleaf.attention.masks import Read, Reads, hidden
from longleaf.kernels import int8
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.kernels.cpu.flash import TorchFlashBackend
from longleaf.kernels.int8 import LOWEST, tiles
from longleaf.merge import MERGES
from tests.support.attention.dealt import BLOCK as POOL_BLOCK
from tests.support.attention.dealt import cases, decode, prefill
from workers.kv_cache.quantized import QuantizedPool

HEADS, BLOCK, NUM_BLOCKS, DIM = 2, 8, 6, 16
SCALE = 0.4
BACKENDS = pytest.mark.parametrize("backend", [NativeBackend(), TorchFlashBackend()], ids=lambda backend: backend.name)
seeds = st.integers(0, 2**31)


def tensors(seed, num_tokens):
    """Keys and values [K, T, D]; some channels are far larger than others, one is zero, and tokens differ."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(HEADS, num_tokens, DIM, generator=generator) for _ in range(2))
    channels = 10 ** torch.empty(HEADS, 1, DIM).uniform_(-4, 4, generator=generator)
    channels[:, :, 0] = 0
    tokens = 10 ** torch.empty(HEADS, num_tokens, 1).uniform_(-2, 2, generator=generator)
    return k * channels, v * tokens


def layer():
    return int8.empty(HEADS, NUM_BLOCKS, BLOCK, DIM)


def bounds_of(total):
    cuts = st.lists(st.integers(1, total - 1), unique=True, max_size=8)
    return cuts.map(lambda inner: [0, *sorted(inner), total])


@settings(max_examples=50, deadline=None)
@given(seeds, st.integers(0, 4 * BLOCK - 1), st.integers(1, 4 * BLOCK))
def test_keys_alone_are_those_that_are_read(seed, start, num_keys):
    retained, slots = layer(), torch.arange(4 * BLOCK)
    int8.write(retained, slots, *tensors(seed, len(slots)))
    end = min(start + num_keys, len(slots))
    keys, _ = int8.read(retained, slots[start:end], torch.float32)
    assert torch.equal(int8.keys_between(retained, start, end), keys)


@settings(max_examples=100, deadline=None)
@given(seeds, bounds_of(3 * BLOCK + 3))
def test_what_a_block_holds_depends_on_its_tokens_alone(seed, bounds):
    """For any partition of the stores, and any earlier content of the slots."""
    k, v = tensors(seed, bounds[-1])
    slots = torch.cat([torch.arange(b * BLOCK, (b + 1) * BLOCK) for b in (4, 1, 2, 0)])[: bounds[-1]]
    whole, parts = layer(), layer()
    int8.write(whole, slots, k, v)
    int8.write(parts, slots, *(1e6 * t for t in tensors(seed + 1, bounds[-1])))
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        int8.write(parts, slots[low:high], k[:, low:high], v[:, low:high])
    for name in ("keys_KSD", "values_KSD", "scales_KS"):
        assert torch.equal(getattr(whole, name)[:, slots], getattr(parts, name)[:, slots])
    blocks = torch.tensor([4, 1, 2, 0])
    assert torch.equal(whole.exponents_KBD[:, blocks], parts.exponents_KBD[:, blocks])


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(1, BLOCK))
def test_keys_are_off_by_a_128th_of_the_largest_of_their_channel(seed, num_tokens):
    """And values by a 254th of the largest of their token."""
    k, v = tensors(seed, num_tokens)
    stored, slots = layer(), torch.arange(num_tokens)
    int8.write(stored, slots, k, v)
    keys, values = int8.read(stored, slots, torch.float32)
    assert ((keys - k).abs() <= k.abs().amax(dim=1, keepdim=True) / 128 + 2.0**LOWEST).all()
    assert ((values - v).abs() <= v.abs().amax(dim=2, keepdim=True) / 254 * (1 + 1e-5)).all()
    assert torch.equal(int8.read(stored, slots, torch.bfloat16)[0].float(), keys)


@BACKENDS
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_non_finite_values_stay_and_affect_no_others(backend, broken, what, dtype):
    k, v = (t.to(dtype) for t in tensors(0, BLOCK))
    k, v = (t.clamp(-9, 9) for t in (k, v))
    (k if what == "key" else v)[0, 3, 5] = broken
    stored, sound, slots = layer(), layer(), torch.arange(BLOCK)
    int8.write(stored, slots[:5], k[:, :5], v[:, :5])
    int8.write(stored, slots[5:], k[:, 5:], v[:, 5:])
    others = slots[slots != 3]
    int8.write(sound, slots, *(t.nan_to_num(0, 0, 0) for t in (k, v)))
    for retained, wanted in zip(int8.read(stored, others, dtype), int8.read(sound, others, dtype), strict=True):
        assert torch.equal(retained, wanted)
    assert not int8.read(stored, slots[3:4], dtype)[1][0].isfinite().any()
    q = torch.randn(2, 2 * HEADS, DIM)
    for read, is_seen in ((Read(0, 2, 0, BLOCK), True), (Read(0, 2, 4, BLOCK), False), (Read(0, 2, 0, 3), False)):
        found = backend.attend_int8(q, stored, Reads([read]), SCALE).out_THD
        assert found[:, :2].isfinite().all(dim=-1).logical_not().all() == is_seen
        assert found[:, 2:].isfinite().all()


@st.composite
def rectangles(draw):
    """A read of any kind over a layer of which all slots are filled."""
    row, slot = draw(st.integers(0, 4)), draw(st.integers(0, NUM_BLOCKS * BLOCK - 1))
    end_row, end = draw(st.integers(row, 5)), draw(st.integers(slot, NUM_BLOCKS * BLOCK))
    offset = draw(st.one_of(st.none(), st.integers(-5, 60)))
    return Read(row, end_row, slot, end, offset, None if offset is None else draw(st.one_of(st.none(), st.just(7))))


def seen(reads, num_rows):
    """Which row sees which slot how often, [T, S]."""
    counts = torch.zeros(num_rows, NUM_BLOCKS * BLOCK, dtype=torch.long)
    for read in reads:
        rows, slots = read.row_end - read.row_start, read.slot_end - read.slot_start
        is_seen = torch.ones(rows, slots, dtype=torch.bool)
        if read.offset is not None:
            is_seen = ~hidden(rows, slots, read.offset, read.window)
        counts[read.row_start : read.row_end, read.slot_start : read.slot_end] += is_seen
    return counts


@BACKENDS
@settings(max_examples=60, deadline=None)
@given(
    seeds, st.lists(rectangles(), max_size=3), st.sampled_from([1, 3, 8]), st.sampled_from([None, 5.0]), st.booleans()
)
def test_attention_is_exact_over_stored_values(backend, seed, reads, group, softcap, is_tiled):
    k, v = tensors(seed, NUM_BLOCKS * BLOCK)
    stored, slots = layer(), torch.arange(NUM_BLOCKS * BLOCK)
    int8.write(stored, slots, k / k.abs().amax().clamp(min=1), v / 100)
    q = torch.randn(5, HEADS * group, DIM, generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "TILE_KEYS", 5 if is_tiled else int8.TILE_KEYS)
        found = backend.attend_int8(q, stored, Reads(reads), SCALE, softcap)
    # the reference counts a key once, so one that is read several times comes several times
    counts = seen(reads, 5)
    keys, values = (t.transpose(0, 1).double() for t in int8.read(stored, slots, torch.float32))
    times = max(1, int(counts.max()))
    mask = torch.cat([counts > i for i in range(times)], dim=1)
    wanted = reference.attend(
        q.double(), keys.repeat(times, 1, 1), values.repeat(times, 1, 1), mask, SCALE, softcap=softcap
    )
    torch.testing.assert_close(found.out_THD.double(), wanted.out_THD, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(found.lse_TH.double(), wanted.lse_TH, atol=5e-6, rtol=5e-6)


@given(st.lists(rectangles(), max_size=4), st.integers(1, 20))
def test_tiles_show_the_rows_the_same_keys(reads, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "TILE_KEYS", size)
        found = list(tiles(reads))
    assert torch.equal(seen(found, 5), seen(reads, 5))
    assert all(read.slot_end - read.slot_start <= size for read in found if read.offset is None)


def apart(**sizes):
    """Cases whose values do not lie in their keys: those cannot be kept in 8 bits."""
    return cases(**sizes).map(lambda case: replace(case, spec=replace(case.spec, latent_dim=None, own_value_dim=None)))


def rounded(case, runs):
    """Keys and values [S, K, D] as they are after the runs were stored."""
    _, k, v = case.tensors()
    keys, values = torch.empty_like(k), torch.empty_like(v)
    for run in (run for resident in runs for run in resident):
        retained = int8.empty(case.spec.num_kv_heads, len(run.blocks), POOL_BLOCK, case.spec.head_dim)
        slots, span = torch.arange(len(run)), slice(run.start, run.end)
        int8.write(retained, slots, k[span].transpose(0, 1), v[span].transpose(0, 1))
        keys[span], values[span] = (t.transpose(0, 1) for t in int8.read(retained, slots, torch.float32))
    return keys, values


@pytest.mark.parametrize("way", ["queries", "keys"])
@settings(max_examples=30, deadline=None)
@given(case=apart())
def test_a_chunk_sees_the_rounded_keys_on_both_ways(way, case):
    found, _ = prefill(case, way, kind=QuantizedPool)
    wanted = case.expected(rounded(case, case.runs(in_rows=False)))
    torch.testing.assert_close(found.double(), wanted, atol=5e-6, rtol=5e-6)


@settings(max_examples=30, deadline=None)
@given(case=apart(most_new=6), merge=st.sampled_from(sorted(MERGES)))
def test_rows_see_the_rounded_keys_on_every_rank(case, merge):
    wanted = case.expected(rounded(case, case.runs(in_rows=True)))
    for found in decode(case, merge, kind=QuantizedPool):
        torch.testing.assert_close(found.double(), wanted, atol=5e-6, rtol=5e-6)
