"""Every merge on every transport against the float64 fold, with awkward shapes: empty shards, few heads, one rank."""

import threading

import pytest
import torch
import torch.multiprocessing as mp

from longleaf.attention import Partial, merge_all
from longleaf.comm.loopback import LoopbackComm, loopback
from longleaf.comm.process_group import ProcessGroupComm, connect_store, open_store
from longleaf.tree import make_merge

MERGES = ("gather", "paper")


def partials(world_size, rows, heads=3, dim=5, empty=()):
    generator = torch.Generator().manual_seed(world_size * 100 + rows)
    found = [
        Partial(torch.randn(rows, heads, dim, generator=generator), torch.randn(rows, heads, generator=generator) * 9)
        for _ in range(world_size)
    ]
    return [Partial.identity(rows, heads, dim) if rank in empty else part for rank, part in enumerate(found)]


def expected(parts):
    return merge_all(torch.stack([p.out_THD.double() for p in parts]), torch.stack([p.lse_TH.double() for p in parts]))


def assert_close(found, wanted):
    torch.testing.assert_close(found.out_THD.double(), wanted.out_THD, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(found.lse_TH.double(), wanted.lse_TH, atol=2e-6, rtol=2e-6)


def on_threads(comms: list[LoopbackComm], work):
    results = [None] * len(comms)

    def run(rank):
        results[rank] = work(comms[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(comms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("empty", [(), (0,), "all"])
def test_merges_on_loopback(name, world_size, empty):
    empty = tuple(range(world_size)) if empty == "all" else empty
    parts = partials(world_size, rows=2 * world_size, empty=empty)
    wanted = expected(parts)
    for found in on_threads(loopback(world_size), lambda comm: make_merge(name, comm).merge(parts[comm.rank])):
        assert_close(found, wanted)
    owned = on_threads(loopback(world_size), lambda comm: make_merge(name, comm).merge_to_owner(parts[comm.rank]))
    for rank, found in enumerate(owned):
        assert_close(found, wanted.rows(2 * rank, 2 * rank + 2))


def test_gather_gives_every_rank_the_same_bits():
    parts = partials(4, rows=8)
    found = on_threads(loopback(4), lambda comm: make_merge("gather", comm).merge(parts[comm.rank]))
    again = on_threads(loopback(4), lambda comm: make_merge("gather", comm).merge(parts[comm.rank]))
    assert all(torch.equal(found[0].out_THD, other.out_THD) for other in found[1:] + again)


def gloo_rank(rank, world_size, port, queue):
    torch.set_num_threads(1)
    store = connect_store("127.0.0.1", port)
    comm = ProcessGroupComm(rank, world_size, store, epoch=1, device="cpu", timeout=60)
    parts = partials(world_size, rows=2 * world_size, empty=(1,))
    wanted = expected(parts)
    for name in MERGES:
        merge = make_merge(name, comm)
        assert_close(merge.merge(parts[rank]), wanted)
        assert_close(merge.merge_to_owner(parts[rank]), wanted.rows(2 * rank, 2 * rank + 2))
    queue.put((rank, comm.broadcast(torch.tensor([rank + 40])).item()))
    comm.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_merges_over_gloo_processes(world_size, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store = open_store("127.0.0.1")
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=gloo_rank, args=(r, world_size, store.port, queue)) for r in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * world_size
    assert sorted(queue.get(timeout=5) for _ in processes) == [(rank, 40) for rank in range(world_size)]
