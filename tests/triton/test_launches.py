"""The host's work around the kernels: it launches few, copies once, and never reads a tensor."""

import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from longleaf.attention.masks import Read, Reads
from longleaf.kernels.backend import Int8Layer
from longleaf.kernels.gpu.backend import TritonKernels

LAYER_READS = Reads([Read(0, 3, 0, 90), Read(1, 2, 90, 100), Read(2, 3, 95, 100, 3, 4)])


class Launches:
    """A launcher that only records its launches."""

    def __init__(self):
        self.names = []

    def __call__(self, kernel, grid, *args, **constants):
        self.names.append(kernel.fn.__name__)


class Ops(TorchDispatchMode):
    """Notes torch's operations that give a tensor and are more than room or a view."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view and "empty" not in func.name():
            self.names.append(func.name())
        return found


def test_a_layer_takes_a_launch_for_each_thing_and_no_other_operation():
    launches, k, q, slots = Launches(), torch.randn(2, 100, 64), torch.randn(3, 8, 64), torch.arange(3)
    kernels = TritonKernels(132, launches)
    kernels.attend(q, k, k, LAYER_READS, 0.1)  # the first layer makes the table
    launches.names.clear()
    with Ops() as ops:
        kernels.store((k, k), slots, (k[:, :3], k[:, :3]))
        kernels.fold(kernels.pack(kernels.attend(q, k, k, LAYER_READS, 0.1), torch.bfloat16)[None])
    assert launches.names == ["store_tokens", "attend_items", "fold_items", "pack_rows", "fold_packed"]
    assert ops.names == []


def test_layers_that_see_alike_share_one_table_and_others_have_their_own():
    reads, kernels, q = Reads(LAYER_READS), TritonKernels(132, Launches()), torch.randn(3, 8, 64)
    for num_kv_heads in (2, 2, 4, 2):
        k = torch.randn(num_kv_heads, 100, 64)
        kernels.attend(q, k, k, reads, 0.1)
    assert len(reads.cache) == 2


def test_the_device_is_not_queried():
    launches = Launches()
    kernels = TritonKernels(132, launches)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether values lie in keys is asked of their addresses
        k, q, slots = torch.randn(2, 100, 64), torch.randn(3, 8, 64), torch.arange(3)
        kernels.store((k,), slots, (k[:, :3],))
        for values in (k, k[..., :48]):
            partial = kernels.attend(q, k, values, Reads(LAYER_READS), 0.1, 30.0)
        assert partial.out_THD.shape == (3, 8, 48)
        kernels.fold(torch.stack([kernels.pack(partial, torch.float32)] * 4))
        keys = torch.empty(2, 128, 64, dtype=torch.int8)
        retained = Int8Layer(keys, keys, torch.empty(2, 4, 64, dtype=torch.int8), torch.empty(2, 128), 32)
        kernels.store_int8(retained, slots, k[:, :3], k[:, :3])
        kernels.attend_int8(q, retained, Reads(LAYER_READS), 0.1)
    assert len(launches.names) == 10
