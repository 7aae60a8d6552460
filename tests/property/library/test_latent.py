"""Values that lie in the keys, or are of another dim, at the sizes of real models: kernels against float64."""

import pytest
import torch

from longleaf.attention import reference
from longleaf.attention.masks import Read
from longleaf.kernels.backend import lies_in
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.kernels.cpu.flash import TorchFlashBackend
from longleaf.kernels.dense import DenseBackend

BACKENDS = [NativeBackend(), TorchFlashBackend(), DenseBackend()]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("num_rows", [1, 3, 50])
def test_latents_of_the_size_of_models_agree_with_float64(backend, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    q, pool = torch.randn(num_rows, 16, 576, generator=generator), torch.randn(1, 700, 576, generator=generator)
    reads = [Read(0, num_rows, 20, 520), Read(0, num_rows, 600, 600 + num_rows, offset=0)]
    found = backend.attend(q, pool, pool[..., :512], reads, 0.07)
    seen = torch.ones(num_rows, num_rows).tril().bool()
    mask = torch.cat([torch.ones(num_rows, 500, dtype=torch.bool), seen], dim=1)
    keys = torch.cat([pool[0, 20:520], pool[0, 600 : 600 + num_rows]])[:, None]
    expected = reference.attend(q, keys, keys[..., :512], mask, 0.07)
    torch.testing.assert_close(found.out_THD.double(), expected.out_THD, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(found.lse_TH.double(), expected.lse_TH, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("num_rows", [1, 50])
def test_values_of_a_dim_of_their_own_agree_with_float64(backend, num_rows):
    """Keys of 192 dims and values of 128, as in MiMo V2, apart and side by side as ranks gather them."""
    generator = torch.Generator().manual_seed(num_rows)
    q, both = torch.randn(num_rows, 8, 192, generator=generator), torch.randn(700, 2, 320, generator=generator)
    side_by_side = both.transpose(0, 1).split((192, 128), dim=-1)
    seen = torch.ones(num_rows, num_rows).tril().bool()
    mask = torch.cat([torch.ones(num_rows, 500, dtype=torch.bool), seen], dim=1)
    rows = torch.cat([both[20:520], both[600 : 600 + num_rows]])
    expected = reference.attend(q, *rows.split((192, 128), dim=-1), mask, 0.07)
    reads = [Read(0, num_rows, 20, 520), Read(0, num_rows, 600, 600 + num_rows, offset=0)]
    for keys, values in (side_by_side, [part.contiguous() for part in side_by_side]):
        found = backend.attend(q, keys, values, reads, 0.07)
        torch.testing.assert_close(found.out_THD.double(), expected.out_THD, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found.lse_TH.double(), expected.lse_TH, atol=2e-6, rtol=2e-6)


def test_values_lie_in_keys_only_where_the_memory_is_the_same():
    keys = torch.randn(2, 9, 8)
    for pool in (keys, keys.transpose(0, 1), keys[:, 3:7], keys[:, 4:4]):
        assert lies_in(pool[..., :5], pool)
    for values in (keys, keys[..., :5].clone(), keys[..., 1:6], keys[:, :7, :5], torch.randn(2, 9, 9)[..., :8]):
        assert not lies_in(values, keys)
