"""The counts of the simulated accelerator, on code whose launches, copies and waits are known."""

import inspect

import pytest
import torch
from torch import Tensor

from tests.support.accelerator.device import Accelerator
from tests.support.accelerator.dispatch import DEVICE
from tests.support.accelerator.events import Log


def device_events(work) -> Log:
    """The device events of work(queries, launcher); the queries are created before."""
    accelerator = Accelerator()
    with accelerator.running():
        queries = torch.ones(4, 8).to(DEVICE)
        accelerator.log.take()
        work(queries, accelerator.launcher)
    return accelerator.log.take()


def transfers(log: Log) -> list[tuple[str, str]]:
    return [(event.kind, event.name) for event in log.events if event.kind != "allocation"]


def a_kernel() -> None:
    """Never runs."""


@torch.library.custom_op("longleaf_tests::ten_launches", mutates_args=())
def ten_launches(numbers: Tensor) -> Tensor:
    for _ in range(10):
        numbers = numbers + 1
    return numbers


@torch.library.custom_op("longleaf_tests::hidden_kernel", mutates_args={"out"})
def hidden_kernel(out: Tensor) -> None:
    LAUNCHERS[-1](a_kernel, (1,), out)


LAUNCHERS = []
"""Operations take only tensors and numbers; a backend gets its launcher in another way."""


def views(q, launch):
    q.view(8, 4).transpose(0, 1)[1:].unsqueeze(0).expand(3, -1, -1).detach()
    torch.empty(3, device=DEVICE), torch.empty_like(q), q.reshape(2, 16)


def in_a_custom_op(q, launch):
    LAUNCHERS.append(launch)
    hidden_kernel(q)


def from_numbers(q, launch):
    torch.tensor([1, 2], device=DEVICE), torch.as_tensor([1.0], device=DEVICE), q.new_tensor([3.0])


def with_an_index_from_the_host(q, launch):
    q[torch.tensor([0, 1])]


COPY_THERE = [("to device", "copy"), ("wait", "to device")]
COPY_BACK = [("to host", "copy"), ("wait", "to host")]


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (views, []),
        (lambda q, launch: q + 1, [("launch", "add")]),
        (lambda q, launch: q.mul_(2), [("launch", "mul_")]),
        (lambda q, launch: q.to(torch.bfloat16), [("launch", "_to_copy")]),
        (lambda q, launch: q.t().reshape(-1), [("launch", "clone")]),
        (lambda q, launch: torch.zeros(2, device=DEVICE), [("launch", "zeros")]),
        (lambda q, launch: torch.nn.functional.linear(q, q), [("launch", "mm")]),
        (lambda q, launch: launch(a_kernel, (3, 2), q, BLOCK=8), [("launch", "a_kernel")]),
        (lambda q, launch: ten_launches(q), [("launch", "add")] * 10),
        (in_a_custom_op, [("launch", "a_kernel")]),
        (from_numbers, COPY_THERE * 3),
        (with_an_index_from_the_host, [*COPY_THERE, ("launch", "index")]),
        (lambda q, launch: q.copy_(torch.ones(4, 8)), COPY_THERE),
        (lambda q, launch: torch.ones(3).to(DEVICE, non_blocking=True), COPY_THERE[:1]),
        (lambda q, launch: q.tolist(), COPY_BACK),
        (lambda q, launch: q.cpu().numpy(), COPY_BACK),
        (lambda q, launch: torch.ones(4, 8).copy_(q), COPY_BACK),
        (lambda q, launch: q[0, 0].item(), [("wait", "_local_scalar_dense")]),
        (lambda q, launch: bool(q[0, 0] > 0), [("launch", "gt"), ("wait", "_local_scalar_dense")]),
        (lambda q, launch: q.nonzero(), [("wait", "nonzero"), ("launch", "nonzero")]),
        (lambda q, launch: q[q > 0], [("launch", "gt"), ("wait", "index"), ("launch", "index")]),
        (
            lambda q, launch: q[0].long().bincount(),
            [("launch", "_to_copy"), ("wait", "bincount"), ("launch", "bincount")],
        ),
        (lambda q, launch: torch.cuda.synchronize(DEVICE), [("wait", "synchronize")]),
        (lambda q, launch: torch.ones(3) + 1, []),
    ],
)
def test_operations_are_counted_by_type(work, expected):
    assert transfers(device_events(work)) == expected


def test_numbers_read_from_the_device_are_ones():
    def read(q, launch):
        assert (q.tolist(), q[0, 0].item(), bool(q.any())) == ([[1.0] * 8] * 4, 1.0, True)
        assert q.nonzero().shape == (32, 2)

    device_events(read)


def test_memory_is_counted_at_allocation():
    def work(q, launch):
        q.mul_(2).view(-1)
        q.to(torch.float64)

    [event] = device_events(work).of("allocation")
    assert (event.name, event.num_bytes) == (DEVICE, 4 * 8 * 8)


def test_each_event_has_its_line():
    def work(q, launch):
        q + 1
        q.tolist()

    first = inspect.getsourcelines(work)[1]
    sites = [f"{__file__[__file__.index('tests/') :]}:{first + i}" for i in (1, 2, 2)]
    assert [event.site for event in device_events(work).of("launch", "to host", "wait")] == sites


@pytest.mark.parametrize("grid", [(0,), (), (1, 1, 1, 1), (2.0,)])
def test_grids_refused_by_triton(grid):
    with pytest.raises(ValueError, match="a_kernel: a grid"):
        device_events(lambda q, launch: launch(a_kernel, grid, q))


def test_kernels_accept_only_device_tensors():
    with pytest.raises(ValueError, match="a_kernel: argument 1 lies on cpu"):
        device_events(lambda q, launch: launch(a_kernel, lambda constants: (constants["N"],), q, torch.ones(1), N=4))


def test_opaque_operations_are_refused():
    with torch.library._scoped_library("longleaf_tests_closed", "DEF") as library:
        library.define("closed(Tensor x) -> Tensor")
        with pytest.raises(NotImplementedError, match="longleaf_tests_closed::closed"):
            device_events(lambda q, launch: torch.ops.longleaf_tests_closed.closed(q))


def test_patches_are_removed_afterwards():
    """Except that torch knows the device."""
    device_events(views)
    assert torch.tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.synchronize(DEVICE)
