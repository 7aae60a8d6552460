"""After drafts were refused, blocks of 8 bits are equal to the bit to blocks that never stored them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.kernels.cpu.flash import TorchFlashBackend
from longleaf.positions import AttentionSpan
from longleaf.rank_protocol.step import Row
from workers.kv_cache.quantized import QuantizedPool
from workers.model.model import LayerSpec
from workers.step.draft_rollback import DraftedBlocks, FixedTokens, StoredKv, drafted_among

BLOCK, NUM_BLOCKS, HEADS, DIM = 8, 6, 2, 16
LAYERS = {0: LayerSpec(4, HEADS, DIM, AttentionSpan()), 1: LayerSpec(4, HEADS, DIM, AttentionSpan(window=6))}
BUCKET = 32
BACKENDS = pytest.mark.parametrize("backend", [NativeBackend(), TorchFlashBackend()], ids=lambda backend: backend.name)
SEQUENCES = st.lists(
    st.tuples(st.integers(0, BLOCK - 1), st.integers(1, 3), st.integers(0, 4), st.integers(0, 4), st.booleans()),
    min_size=1,
    max_size=3,
)
"""For each sequence: resident tokens, new ones, drafts, the number of accepted drafts, and whether keys are on this
rank.
"""


class Tokens:
    """The keys and values of one sequence in both layers, some of them far larger than others."""

    def __init__(self, number, seed, num_tokens):
        generator = torch.Generator().manual_seed(seed + number)
        self.number = number
        sizes = 10 ** torch.empty(1, num_tokens, 1).uniform_(-2, 2, generator=generator)
        self.of_layers = [
            [sizes * torch.randn(HEADS, num_tokens, DIM, generator=generator) for _ in range(2)] for _ in LAYERS
        ]


def pool_of(window_blocks):
    pool = QuantizedPool(LAYERS, NUM_BLOCKS, BLOCK, torch.float32, "cpu", window_blocks)
    for part in parts(pool):
        part.zero_()
    return pool


def parts(pool):
    return [part.tensor for of_windows in (False, True) for part in pool.blocks(of_windows=of_windows)]


def fixed_tokens(seed):
    """After a step of more rows."""
    fixed, generator = FixedTokens(), torch.Generator().manual_seed(seed)
    for layer in LAYERS:
        parts = (torch.randn(HEADS, 2 * BUCKET, DIM, generator=generator) for _ in range(2))
        fixed.record(layer, StoredKv(torch.zeros(2 * BUCKET, dtype=torch.long), *parts))
    return fixed


def slots_of(number, start, end, shift=0):
    """In a sequence's own two blocks."""
    first = 2 * number * BLOCK + shift
    return list(range(first + start, first + end))


@BACKENDS
@given(SEQUENCES, st.integers(0, 1 << 30), st.sampled_from([None, NUM_BLOCKS]), st.integers(0, 3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_pool_is_as_if_refused_drafts_had_never_been_stored(backend, sequences, seed, window_blocks, shift, is_fixed):
    """With and without fixed addresses for the stored tensors, which have the size of larger steps."""
    pool, other = pool_of(window_blocks), pool_of(window_blocks)
    rows, slots, window_slots, fresh, num_left, step = [], [], [], [[[], []] for _ in LAYERS], {}, 0
    sample_rows = []
    for number, (resident, coming, num_drafts, accepted, is_here) in enumerate(sequences):
        num_drafts = min(num_drafts, 2 * BLOCK - shift - resident - coming)
        accepted, total = min(accepted, num_drafts), resident + coming + num_drafts
        tokens = Tokens(number, seed, total)
        left = coming + accepted

        def places(layer, start, end, number=number, is_here=is_here):
            is_windowed = layer == 1 and window_blocks is not None
            if not is_here and not is_windowed:
                return [pool.trash_slot] * (end - start)
            return slots_of(number, start, end, shift if is_windowed else 0)

        for layer, (k, v) in enumerate(tokens.of_layers):
            for i in range(resident + left):
                args = backend, layer, torch.tensor(places(layer, i, i + 1)), k[:, i : i + 1], v[:, i : i + 1]
                other.store(*args)
                if i < resident:
                    pool.store(*args)
            fresh[layer][0].append(k[:, resident:])
            fresh[layer][1].append(v[:, resident:])
        slots += places(0, resident, total)
        window_slots += places(1, resident, total) if window_blocks is not None else []
        step += coming + num_drafts
        sample_rows += range(step - 1 - num_drafts, step)
        rows.append(Row(number, (0,), resident, (1,) * coming, (), 0, draft_ids=(1,) * num_drafts))
        if accepted < num_drafts:
            num_left[number] = left
    drafted = DraftedBlocks(pool, backend, drafted_among(rows, sample_rows), slots, window_slots)
    fixed = fixed_tokens(seed)
    for layer, tensors in enumerate(fresh):
        k, v = (torch.cat(parts, dim=1) for parts in tensors)
        is_windowed = layer == 1 and window_blocks is not None
        slots_T = torch.tensor(window_slots if is_windowed else slots)
        pool.store(backend, layer, slots_T, k, v)
        drafted.record(layer, StoredKv(slots_T, k, v))
        trash = pool.window_trash_slot if is_windowed else pool.trash_slot
        padding = BUCKET - len(slots_T)
        fixed.record(
            layer, StoredKv(pad(slots_T, (0, padding), value=trash), *(pad(t, (0, 0, 0, padding)) for t in (k, v)))
        )
    if is_fixed:
        drafted.stored = fixed.stored_by_layer(BUCKET)
    drafted.restore(num_left)
    for mine, theirs in zip(parts(pool), parts(other), strict=True):
        assert torch.equal(mine[:, :-1], theirs[:, :-1])
