"""Runs transferred between processes: through shared memory in many pieces, over gloo, and with NCCL's calls."""

import pytest
import torch

from longleaf.comm.base import Groups
from longleaf.comm.shared_memory import CAPACITY
from longleaf.comm.staged import staged
from longleaf.positions import EVERY_RANK, AttentionSpan
from longleaf.rank_protocol.group_messages import SegmentLayout
from longleaf.rank_protocol.step import Move, RunTransfer
from longleaf.runs import Run
from tests.support.nccl import Fleet
from tests.support.processes import run_ranks
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.slots import FloatKvPool
from workers.model.model import LayerSpec
from workers.runners.kv_transfer import Content, move

BLOCK, NUM_BLOCKS = 64, 24
LAYERS = {0: LayerSpec(8, 4, 64, AttentionSpan()), 1: LayerSpec(8, 4, 64, AttentionSpan(100))}
FIRST, SECOND = Run(0, 0, 1000, tuple(range(16))), Run(2, 1000, 1500, tuple(range(8)))
LAYOUT = SegmentLayout(7, 0, (FIRST, SECOND))
TARGETS = (Run(1, 0, 1000, tuple(range(23, 7, -1))), Run(0, 1000, 1500, tuple(range(16, 24))))
WINDOWS = (Run(EVERY_RANK, 1400, 1500, (9, 3)),)
MOVE = Move((RunTransfer(7, FIRST, TARGETS[0]), RunTransfer(7, SECOND, TARGETS[1])), WINDOWS)


def bits(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    pool = FloatKvPool(LAYERS, NUM_BLOCKS, BLOCK, torch.float32, "cpu", NUM_BLOCKS)
    shape = (NUM_BLOCKS, Content(pool).bytes_per_block)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def carry_out(rank: int, groups: Groups) -> bool:
    """Whether the rank then stores the right content and knows all placements."""
    pool = FloatKvPool(LAYERS, NUM_BLOCKS, BLOCK, torch.float32, "cpu", NUM_BLOCKS)
    sharded, windows = Content(pool), Content(pool, of_windows=True)
    assert sharded.bytes_per_block * len(FIRST.blocks) > CAPACITY
    sharded.restore(range(NUM_BLOCKS), bits(rank))
    windows.restore(range(NUM_BLOCKS), bits(10 + rank))
    block_table = BlockTable(rank, BLOCK)
    block_table.replace([LAYOUT])
    move(MOVE, groups.world, pool, block_table)
    wanted, wanted_windows = bits(rank), bits(10 + rank)
    for source, target in zip((FIRST, SECOND), TARGETS, strict=True):
        if target.rank == rank:
            wanted[list(target.blocks)] = bits(source.rank)[list(source.blocks)]
    wanted_windows[[9, 3]] = bits(10)[[9, 3]]
    there = [[(e.start, e.end) for e in block_table.extents((7,), 0, 1500, other)] for other in range(3)]
    return (
        torch.equal(sharded.export(range(NUM_BLOCKS)), wanted)
        and torch.equal(windows.export(range(NUM_BLOCKS)), wanted_windows)
        and [{p for low, high in found for p in range(low, high)} for found in there]
        == [set(range(1000, 1500)), set(range(1000)), set()]
    )


def in_shared_memory(rank, owner):
    return owner.groups.world.transport, carry_out(rank, owner.groups)


def over_gloo(rank, owner):
    return owner.groups.world.transport, carry_out(rank, owner.groups) and carry_out(rank, staged(owner.groups))


def test_in_shared_memory():
    assert run_ranks("aaa", in_shared_memory) == [("shared_memory", True)] * 3


@pytest.mark.slow
def test_over_gloo_and_copied_through_the_host():
    assert run_ranks("aab", over_gloo) == [("gloo", True)] * 3


@pytest.mark.parametrize("machines", ["aaa", "aabb", "abcc"])
def test_on_a_simulated_nccl(machines):
    assert all(Fleet(machines).run(carry_out))
