"""The kernels that pack partials and fold packed ones, and the store of keys as they are."""

import pytest
import torch

from longleaf.attention import Partial, merge_all, packed
from longleaf.kernels.gpu.backend import TritonKernels
from tests.support.attention.partials import assert_same

KERNELS = TritonKernels(4)
TYPES = [torch.float32, torch.bfloat16]


def partial_of(num_rows, heads, dim, empty=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    out, lse = (
        torch.randn(num_rows, heads, dim, generator=generator),
        9 * torch.randn(num_rows, heads, generator=generator),
    )
    for row in empty:
        out[row], lse[row] = 0, -torch.inf
    return Partial(out, lse)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [5, 16, 128])
def test_a_packed_partial_is_what_torch_packs(dtype, dim):
    """Values in bfloat16 except for the last bit: Triton's interpreter truncates where a GPU rounds."""
    partial = partial_of(7, 3, dim, empty=[2])
    found, wanted = KERNELS.pack(partial, dtype), packed.pack(partial, dtype)
    assert torch.equal(packed.unpack(found).lse_TH, partial.lse_TH)
    rtol = 0 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(packed.unpack(found).out_THD, packed.unpack(wanted).out_THD, rtol=rtol, atol=0)


def test_what_is_packed_may_lie_anyhow():
    out, lse = torch.randn(3, 5, 16).transpose(0, 1), torch.randn(3, 5).t()
    assert torch.equal(KERNELS.pack(Partial(out, lse), torch.float32), packed.pack(Partial(out, lse), torch.float32))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_partials", [1, 2, 3, 8])
def test_packed_partials_are_folded_as_torch_folds_them(dtype, num_partials):
    stacked = torch.stack(
        [packed.pack(partial_of(7, 3, 24, empty=[2, i % 7], seed=i), dtype) for i in range(num_partials)]
    )
    wanted = packed.unpack(stacked)
    found = KERNELS.fold(stacked)
    assert_same(found, merge_all(wanted.out_THD, wanted.lse_TH))
    assert (found.lse_TH[2] == -torch.inf).all() and not found.out_THD[2].any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_partial_of_nan_shows():
    stacked = torch.stack([packed.pack(partial_of(2, 1, 8, seed=i), torch.float32) for i in range(3)])
    stacked[1, 1] = torch.nan
    found = KERNELS.fold(stacked)
    assert found.out_THD[1].isnan().all() and found.lse_TH[1].isnan().all() and found.out_THD[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_tokens_go_into_their_slots_and_nothing_else_changes(dtype, num_tokens):
    k, v = torch.randn(num_tokens, 2, 2, 24).to(dtype).permute(2, 1, 0, 3)  # as models hand them over
    slots = torch.randperm(30)[:num_tokens]
    found, wanted = ([torch.zeros(2, 30, 24, dtype=dtype) for _ in range(2)] for _ in range(2))
    KERNELS.store(found, slots, (k, v))
    for pool, tokens in zip(wanted, (k, v), strict=True):
        pool.index_copy_(1, slots, tokens)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_values_that_lie_in_the_keys_go_with_them():
    k = torch.randn(1, 5, 24)
    pool, slots = torch.zeros(1, 30, 24), torch.tensor([3, 9, 1, 22, 0])
    KERNELS.store((pool,), slots, (k, k[..., :16]))
    assert torch.equal(pool, torch.zeros(1, 30, 24).index_copy_(1, slots, k))


def test_tokens_lie_anyhow():
    k = torch.randn(1, 24, 5).transpose(1, 2)
    pool = torch.zeros(1, 30, 24)
    KERNELS.store((pool,), torch.arange(5), (k,))
    assert torch.equal(pool[:, :5], k)
