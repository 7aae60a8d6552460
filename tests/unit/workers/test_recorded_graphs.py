"""The simulated CUDA graphs: a replay equals a fresh run, and the operations that a capture refuses are refused."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.cuda_graphs import RecordedGraphs
from tests.support.loopback import loopback
from workers.cuda_graphs.graphs import CaptureRefused

ROWS, COLUMNS = 4, 6


def numbers(seed, *shape):
    return torch.randn(*(shape or (ROWS, COLUMNS)), generator=torch.Generator().manual_seed(seed))


class Memory:
    """Tensors of fixed address, as a step has them."""

    def __init__(self):
        self.x = torch.zeros(ROWS, COLUMNS)
        self.ids = torch.zeros(ROWS, dtype=torch.long)
        self.state = torch.zeros(8, COLUMNS)
        self.out = torch.zeros(ROWS, COLUMNS)
        self.weights = numbers(0, COLUMNS, COLUMNS)
        self.fill(0)

    def fill(self, seed):
        self.x.copy_(numbers(seed))
        self.ids.copy_(torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)))

    def tensors(self):
        return list(vars(self).values())


def many_operations(memory):
    """Operations: views, in-place, indexing, sorting, sums, scatter, products, and output into given memory."""
    x, ids = memory.x, memory.ids
    scores = torch.nn.functional.linear(x, memory.weights)
    scores.view(-1)[::2].mul_(0.5)
    scores[1:] += x[:-1]
    scores[0] = 3.0
    scores[scores > 2.5] = 1.0
    ordered, order = scores.sort(dim=-1, stable=True)
    ordered.masked_fill_(ordered < -1.0, -torch.inf)
    shares = torch.softmax(scores.scatter_(1, order, ordered), dim=-1)
    cumulative = shares.cumsum(dim=-1)
    found = torch.searchsorted(cumulative, x[:, :1].abs().contiguous(), right=True).clamp(max=COLUMNS - 1)
    memory.state.index_copy_(0, ids, x.index_select(0, ids))
    memory.state[ids] += 1.0
    room = torch.empty_like(x)
    torch.where(x > 0, shares @ memory.weights, memory.state[ids] * 2, out=room)
    room.unsqueeze_(0)
    torch.add(room[0], found, alpha=2, out=memory.out)
    rows = torch.arange(ROWS)[:, None] * torch.ones_like(memory.ids)
    memory.out.add_(torch.where(rows > 1, 1.0, 0.0)[:, :1]).add_(x.reshape(COLUMNS, ROWS).t().contiguous())


def fresh_and_replayed(function, fill=lambda memory, seed: memory.fill(seed), seeds=(3, 1, 2)):
    """Memory after each of several runs of a function, and after replays of it."""
    memory, replayed = Memory(), Memory()
    replay = RecordedGraphs().capture(lambda: function(replayed))
    for seed in seeds:
        fill(memory, seed)
        fill(replayed, seed)
        with torch.inference_mode():
            function(memory)
        replay()
        yield memory, replayed


def equal(some, others):
    pairs = zip(some.tensors(), others.tensors(), strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_replay_equals_a_fresh_run_bit_for_bit():
    outs = []
    for memory, replayed in fresh_and_replayed(many_operations):
        assert equal(memory, replayed)
        outs.append(replayed.out.clone())
    assert not torch.equal(outs[0], outs[1])


def test_capture_does_not_execute():
    memory, untouched, leaked = Memory(), Memory(), []

    def function():
        many_operations(memory)
        leaked.append(memory.x + 1)

    replay = RecordedGraphs().capture(function)
    assert equal(memory, untouched)
    assert leaked[0].isnan().all()
    replay()
    assert torch.equal(leaked[0], memory.x + 1)


def test_replaced_tensors_are_not_seen():
    memory = Memory()
    replay = RecordedGraphs().capture(lambda: memory.out.copy_(memory.x * 2))
    captured, memory.x = memory.x, numbers(9)
    replay()
    assert torch.equal(memory.out, captured * 2)
    captured.copy_(memory.x)
    replay()
    assert torch.equal(memory.out, memory.x * 2)


def test_python_numbers_are_frozen():
    memory, factor = Memory(), [2]
    replay = RecordedGraphs().capture(lambda: memory.out.copy_(memory.x * factor[0]))
    factor[0] = 3
    replay()
    assert torch.equal(memory.out, memory.x * 2)


def test_graph_memory_does_not_persist_between_replays():
    memory, retained = Memory(), []

    def function():
        if not retained:
            retained.append(memory.x.new_empty(ROWS, COLUMNS))
        memory.out.copy_(retained[0])
        retained[0].copy_(memory.x)

    replay = RecordedGraphs().capture(function)
    for _ in range(2):
        replay()
        assert memory.out.isnan().all()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda m: m.x[0, 0].item(), "aten::_local_scalar_dense"),
        (lambda m: bool(m.x[0, 0] > 0), "aten::_local_scalar_dense"),
        (lambda m: float(m.x.sum()), "aten::_local_scalar_dense"),
        (lambda m: range(m.ids[0]), "aten::_local_scalar_dense"),
        (lambda m: torch.allclose(m.x, m.out), "aten::"),
        (lambda m: torch.equal(m.x, m.out), "aten::equal"),
        (lambda m: m.ids.tolist(), "tolist"),
        (lambda m: m.x.numpy(), "numpy"),
        (lambda m: np.asarray(m.x), "__array__"),
        (lambda m: m.x.cpu(), "cpu"),
        (lambda m: f"{m.x}", "__format__"),
        (lambda m: m.x.nonzero(), "aten::nonzero"),
        (lambda m: torch.where(m.x > 0), "aten::nonzero"),
        (lambda m: m.x[m.x > 0], "aten::index.Tensor"),
        (lambda m: m.x.__setitem__(m.x > 0, m.out[0, 0]), "aten::index_put_"),
        (lambda m: m.ids.unique(), "aten::_unique2"),
        (lambda m: m.ids.bincount(), "aten::bincount"),
        (lambda m: m.x.masked_select(m.x > 0), "aten::masked_select"),
        (lambda m: m.x.repeat_interleave(m.ids, dim=0), "aten::repeat_interleave.Tensor"),
        (lambda m: torch.tensor([1.0]), "aten::lift_fresh"),
        (lambda m: torch.tensor(1.0), "aten::lift_fresh"),
        (lambda m: torch.as_tensor(np.ones(2)), "aten::lift_fresh"),
        (lambda m: m.x.new_tensor([1.0]), "aten::lift_fresh"),
        (lambda m: torch.from_numpy(np.ones(2)), "aten::lift_fresh"),
        (lambda m: m.x[[0, 1]], "aten::lift_fresh"),
        (lambda m: torch.randn(2), "aten::randn"),
        (lambda m: m.x.exponential_(), "aten::exponential_"),
        (lambda m: m.x.softmax(-1).multinomial(1), "aten::multinomial"),
        (lambda m: RecordedGraphs().capture(lambda: m.x.tolist()), "tolist"),
    ],
)
def test_operations_refused_in_a_capture(function, name):
    memory = Memory()
    before = memory.out.clone()

    def spoils_and_asks():
        memory.out.zero_()
        function(memory)

    with pytest.raises(CaptureRefused, match=f"^{name}.* at .*test_recorded_graphs:[0-9]+: ") as refusal:
        RecordedGraphs().capture(spoils_and_asks)
    assert "host" in str(refusal.value) or "random" in str(refusal.value)
    assert torch.equal(memory.out, before)


def test_refusals_leave_no_state():
    memory, graphs = Memory(), RecordedGraphs()
    with pytest.raises(CaptureRefused, match="tolist"):
        graphs.capture(lambda: memory.x.tolist())
    with pytest.raises(CaptureRefused, match="a capture within a capture"):
        graphs.capture(lambda: graphs.capture(lambda: None))
    assert memory.ids.tolist()
    graphs.capture(lambda: memory.out.copy_(memory.x))()
    assert torch.equal(memory.out, memory.x)


def test_host_memory_is_not_changed():
    memory = Memory()
    graphs = RecordedGraphs([memory.x])
    for function in (lambda: memory.out.copy_(memory.x[:]), lambda: memory.x.copy_(memory.out)):
        with pytest.raises(CaptureRefused, match="memory of the host"):
            graphs.capture(function)
    with pytest.raises(CaptureRefused, match="memory of the host"):
        graphs.capture(lambda: graphs.launcher(add_to)("add", (1,), memory.x, memory.out, 1.0))
    graphs.capture(lambda: memory.out.mul_(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_products_synchronize_unless_all_is_bfloat16(dtype):
    rows, weights = numbers(1, 8, 16).to(dtype), numbers(2, 2, 16, 16).to(dtype)
    ends, out = torch.tensor([3, 8], dtype=torch.int32), torch.zeros(8, 16, dtype=dtype)

    def function():
        out.copy_(torch.nn.functional.grouped_mm(rows, weights, offs=ends))

    if dtype != torch.bfloat16:
        with pytest.raises(CaptureRefused, match="offsets"):
            RecordedGraphs().capture(function)
        return
    replay = RecordedGraphs().capture(function)
    ends[0] = 5
    replay()
    replayed = out.clone()
    function()
    assert torch.equal(out, replayed)


def add_to(kernel, grid, x, out, number):
    """A write by a kernel that torch does not observe."""
    assert (kernel, grid) == ("add", (1,))
    out.numpy()[:] = x.numpy() + number


def test_launches_are_replayed():
    memory, graphs, number = Memory(), RecordedGraphs(), [1.0]
    launch = graphs.launcher(add_to)

    def function():
        room = torch.empty_like(memory.x)
        launch("add", (1,), memory.x * 2, room, number[0])
        launch("add", (1,), room.relu(), memory.out, 2.0)

    before = memory.out.clone()
    replay = graphs.capture(function)
    assert torch.equal(memory.out, before)
    number[0] = 5.0
    for seed in (1, 2):
        memory.fill(seed)
        replay()
        assert torch.equal(memory.out, (memory.x * 2 + 1.0).relu() + 2.0)
    launch("add", (1,), memory.x, memory.out, 0.0)
    assert torch.equal(memory.out, memory.x)


class ReusingComm:
    """A Comm that reuses the memory of its results."""

    def __init__(self, inner):
        self.inner = inner
        self.transport, self.rank, self.world_size = inner.transport, inner.rank, inner.world_size
        self.results = {}

    def __getattr__(self, name):
        def exchange(tensor, *options):
            found = getattr(self.inner, name)(tensor, *options)
            return self.results.setdefault(found.shape, torch.zeros_like(found)).copy_(found)

        return exchange


def exchanges(comm, x):
    """Every operation of a Comm; several use results of others."""
    gathered = comm.all_gather(x)
    sent = comm.all_to_all(gathered + comm.rank)
    passed = comm.permute(x * 2, (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size)
    return gathered.sum(0) + sent.sum(0) + passed + comm.all_reduce(x, "max") + comm.broadcast(passed)


def test_exchanges_are_replayed_by_ranks_in_threads():
    ends, outs = loopback(3), [torch.zeros(ROWS, COLUMNS) for _ in range(3)]
    wanted = [None] * 3

    def live(rank):
        graphs, x = RecordedGraphs(), torch.zeros(ROWS, COLUMNS)
        comm = graphs.comm(ReusingComm(ends[rank]))
        replay = graphs.capture(lambda: outs[rank].copy_(exchanges(comm, x)))
        for seed in (1, 2):
            x.copy_(numbers(10 * seed + rank))
            replay()
        wanted[rank] = exchanges(ends[rank], x)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out, expected in zip(outs, wanted, strict=True):
        assert torch.equal(out, expected)


STEPS = {
    "add": lambda a, b: a + b,
    "add in place": lambda a, b: a.add_(b),
    "product": lambda a, b: a @ b.t() @ b * 0.1,
    "softmax": lambda a, b: a.softmax(dim=-1),
    "view": lambda a, b: a.view(COLUMNS, ROWS).view(ROWS, COLUMNS),
    "turn": lambda a, b: a.flip(0),
    "part in place": lambda a, b: (a[1:].mul_(b[:-1].clone()), a)[1],
    "part set": lambda a, b: (a.__setitem__(slice(1, 3), b[:2].clone()), a)[1],
    "where": lambda a, b: torch.where(a > b, a, -1),
    "sort": lambda a, b: a.sort(dim=-1, stable=True).values,
    "order": lambda a, b: b.gather(1, a.argsort(dim=-1)),
    "sums": lambda a, b: a.tanh().cumsum(dim=-1),
    "select": lambda a, b: a.index_select(0, (b[:, 0] > 0).long()),
    "copy by index": lambda a, b: a.index_copy_(0, b[:, 0].argsort(), b.clone()),
    "scatter": lambda a, b: a.clone().scatter_(1, b.argsort(dim=-1), 2.0),
    "out": lambda a, b: torch.mul(a, b, out=torch.empty(0)),
    "rms": lambda a, b: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6),
    "cat": lambda a, b: torch.cat((a[:2], b[2:])),
    "half": lambda a, b: (a.bfloat16() * b.bfloat16()).float(),
    "largest": lambda a, b: torch.zeros_like(a).scatter_(1, *reversed(a.topk(2))),
    "einsum": lambda a, b: torch.einsum("rc,sc->rs", a, b) @ b,
}
programs = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 8), st.integers(0, 8)), max_size=12)


@given(program=programs, seeds=st.lists(st.integers(0, 100), min_size=1, max_size=3))
def test_replays_of_programs_equal_their_runs(program, seeds):
    def function(memory):
        found = [memory.x, memory.state[:ROWS], memory.x * 2]
        for name, a, b in program:
            found.append(STEPS[name](found[a % len(found)], found[b % len(found)]))
        memory.out.copy_(found[-1])

    for memory, replayed in fresh_and_replayed(function, seeds=seeds):
        assert equal(memory, replayed)
