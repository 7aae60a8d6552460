"""Captured sampling over memory of fixed address, before the first request."""

import pytest
import torch

from workers.cuda_graphs.bucket import fields_of
from workers.cuda_graphs.sampling_graph import GraphSampler
from workers.sampling.device_sampler import DeviceSampler
from workers.sampling.fixed_shape import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_captured_sampling_uses_padding_parameters(kind):
    """Zeros, the initial content of memory, are not valid parameters: the 0 likeliest tokens are no tokens."""
    num_rows, size = 4, 50
    ids = torch.full((num_rows,), -5)
    choosing = GraphSampler(DeviceSampler("cpu", 4), torch.zeros(num_rows, size), ids)
    fields = fields_of(num_rows)
    numbers_N = torch.zeros(fields.tables.start, dtype=torch.long)
    assert choosing.fill(numbers_N.numpy(), fields, ()) is None
    choosing.work(numbers_N, fields, kind)()
    assert ids.tolist() == [0] * num_rows, "the first of equal logits"
