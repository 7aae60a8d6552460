"""How tokens are chosen over memory of fixed address, before anybody has asked for one."""

import pytest
import torch

from workers.cuda_graphs.bucket import fields_of
from workers.cuda_graphs.sampling_graph import GraphSampler
from workers.sampling.device_sampler import DeviceSampler
from workers.sampling.fixed_shape import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_captured_has_parameters_of_nobody(kind):
    """Those that memory is made with, zeros, no row may have: the 0 likeliest tokens are none."""
    num_rows, size = 4, 50
    ids = torch.full((num_rows,), -5)
    choosing = GraphSampler(DeviceSampler("cpu", 4), torch.zeros(num_rows, size), ids)
    fields = fields_of(num_rows)
    numbers_N = torch.zeros(fields.tables.start, dtype=torch.long)
    assert choosing.fill(numbers_N.numpy(), fields, ()) is None
    choosing.work(numbers_N, fields, kind)()
    assert ids.tolist() == [0] * num_rows, "of equal logits the first"
