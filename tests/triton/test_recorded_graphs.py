"""Kernels in a captured function: launches are replayed over memory with new content."""

import pytest
import torch

from longleaf.attention.masks import Read, Reads
from longleaf.kernels.gpu.backend import TritonKernels
from longleaf.kernels.gpu.launch import launch
from tests.support.fakes.cuda_graphs import RecordedGraphs
from workers.cuda_graphs.graphs import CaptureRefused

READS = [Read(0, 3, 0, 90), Read(1, 2, 90, 100), Read(2, 3, 95, 100, 3, 4)]
SCALE = 0.2


class Layer:
    """An attention layer's work in a step, in memory of fixed address."""

    def __init__(self, kernels):
        self.kernels, self.reads = kernels, Reads(READS)
        self.new = torch.zeros(4, 2, 3, 16)
        self.pool = [torch.zeros(2, 101, 16) for _ in range(2)]
        self.slots = torch.zeros(3, dtype=torch.long)
        self.out = torch.zeros(3, 4, 16)
        self.fill(0)

    def fill(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.new.copy_(torch.randn(self.new.shape, generator=generator))
        self.slots.copy_(torch.randperm(100, generator=generator)[:3])

    @torch.inference_mode()
    def run(self):
        queries, (keys, values) = self.new[:2].flatten(0, 1).transpose(0, 1), self.new[2:]
        self.kernels.store(self.pool, self.slots, (keys, values))
        partial = self.kernels.attend(queries, *self.pool, self.reads, SCALE)
        packed = torch.stack([self.kernels.pack(part, torch.float32) for part in (partial, partial)])
        self.out.copy_(self.kernels.fold(packed).out_THD)


def test_replayed_kernels_do_what_fresh_ones_do():
    graphs = RecordedGraphs()
    fresh, captured = Layer(TritonKernels(4)), Layer(TritonKernels(4, graphs.launcher(launch)))
    with pytest.raises(CaptureRefused, match="lift_fresh at longleaf.kernels.gpu.backend"):
        graphs.capture(captured.run)  # it sends a table of work items
    captured.run()
    replay = graphs.capture(captured.run)
    fresh.run()
    for seed in (1, 2, 3):
        for layer, run in ((fresh, fresh.run), (captured, replay)):
            layer.fill(seed)
            run()
        assert torch.equal(fresh.out, captured.out)
        assert fresh.out.any()
        assert all(torch.equal(*pair) for pair in zip(fresh.pool, captured.pool, strict=True))
