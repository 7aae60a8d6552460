"""Small pools of every kind."""

from collections.abc import Callable

import torch

from longleaf.positions import AttentionSpan
from workers.kv_cache.quantized import QuantizedPool
from workers.kv_cache.slots import FloatKvPool, KvPool
from workers.model.model import LayerSpec

BLOCK, NUM_BLOCKS, NUM_WINDOW_BLOCKS = 3, 12, 7
FULL, NEAR = LayerSpec(4, 2, 8, AttentionSpan()), LayerSpec(6, 3, 5, AttentionSpan(10))
LATENT = LayerSpec(4, 1, 8, AttentionSpan(), latent_dim=5)
NARROW = LayerSpec(4, 2, 8, AttentionSpan(), own_value_dim=5)


def plain(
    *specs: LayerSpec, dtype: torch.dtype = torch.float32, num_window_blocks: int | None = None
) -> Callable[[], KvPool]:
    return lambda: FloatKvPool(dict(enumerate(specs)), NUM_BLOCKS, BLOCK, dtype, "cpu", num_window_blocks)


def quantized(*specs: LayerSpec, num_window_blocks: int | None = None) -> Callable[[], KvPool]:
    return lambda: QuantizedPool(dict(enumerate(specs)), NUM_BLOCKS, BLOCK, torch.float32, "cpu", num_window_blocks)


POOLS = {
    "plain": plain(FULL, NEAR),
    "half": plain(FULL, NEAR, dtype=torch.bfloat16),
    "latents": plain(LATENT, LATENT),
    "narrow values": plain(NARROW, FULL),
    "int8": quantized(FULL, NEAR),
    "windows apart": plain(FULL, NEAR, FULL, num_window_blocks=NUM_WINDOW_BLOCKS),
    "int8 windows apart": quantized(NEAR, FULL, num_window_blocks=NUM_WINDOW_BLOCKS),
    "windows alone": plain(NEAR, NEAR, num_window_blocks=NUM_WINDOW_BLOCKS),
}


def filled(make: Callable[[], KvPool], seed: int) -> KvPool:
    """A pool in whose blocks anything lies."""
    pool, generator = make(), torch.Generator().manual_seed(seed)
    for of_windows in (False, True):
        for _, tensor, _ in pool.blocks(of_windows=of_windows):
            bits = torch.randint(-60, 60, tensor.shape, generator=generator)
            tensor.copy_(bits if tensor.dtype == torch.int8 else bits / 7)
    return pool
