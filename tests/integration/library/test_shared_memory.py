"""Ranks connected through shared memory: as processes of one machine, and of simulated ones."""

import ctypes
import logging
import multiprocessing
import os
import random
import signal
import subprocess
from itertools import combinations

import psutil
import pytest
import torch

from longleaf.attention import merge_all
from longleaf.comm import shared_memory
from longleaf.comm.process_group import TransportChoice
from longleaf.comm.shared_memory import CAPACITY, SegmentSetup, share_memory
from longleaf.comm.shm_cleanup import FOLDER, ProcessIdentity, started_at
from longleaf.errors import CollectiveMismatch, RankLost
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.merge import MERGES, PartialCodec, make_merge
from tests.support.attention.partials import random_partials
from tests.support.counting_comm import counting
from tests.support.processes import run_ranks, start_ranks

SAME_BITS = ("gather", "exchange", "hierarchy", "butterfly")


def close(found, wanted):
    for a, b in ((found.out_THD, wanted.out_THD), (found.lse_TH, wanted.lse_TH)):
        torch.testing.assert_close(a.double(), b, atol=2e-6, rtol=2e-6)


def merge_everything(rank, owner):
    """Checks every merge twice, with one row and with several; returns the bits of merges that promise equal results
    everywhere."""
    groups = owner.groups
    world_size, bits = groups.world.world_size, {}
    for rows in (1, 2 * world_size):
        last = {world_size - 1} if world_size > 1 else ()
        parts = random_partials(world_size, rows, empty=last)
        wanted = merge_all(
            torch.stack([p.out_THD.double() for p in parts]), torch.stack([p.lse_TH.double() for p in parts])
        )
        for name in MERGES:
            merge = make_merge(name, groups, PartialCodec(NativeBackend()))
            found = [merge.to_all(parts[rank]) for _ in range(2)]  # the first must outlive the second's exchanges
            close(found[0], wanted)
            assert torch.equal(found[0].out_THD, found[1].out_THD) or name not in SAME_BITS
            if name in SAME_BITS:
                bits[name, rows] = found[0].out_THD.numpy().tobytes() + found[0].lse_TH.numpy().tobytes()
            if rows > 1:
                close(merge.to_owner(parts[rank]), wanted.rows(2 * rank, 2 * rank + 2))
    return bits, groups.world.transport, groups.node.transport


@pytest.mark.sampled(3)
@pytest.mark.parametrize("machines", ["a", "aa", "aaa", "aaaa", "aabb", "aaab"])
def test_merges_over_processes(machines):
    results = run_ranks(machines, merge_everything)
    assert all(result == results[0] for result in results)
    world, node = results[0][1:]
    assert node == ("shared_memory" if len(machines) > 1 else "gloo")
    assert world == (node if len(set(machines)) == 1 else "gloo")


def use_small_boards(rank):
    shared_memory.CAPACITY = 4096


def exchange_at_random(rank, owner):
    """Thousands of operations of random kinds and sizes. Each result is checked just before the next operation starts,
    up to which it must stay valid."""
    comm = owner.groups.world
    choice, n = random.Random(5), comm.world_size
    found = wanted = torch.zeros(0)
    for step in range(6000):
        size = choice.choice((0, 1, 7, 64, 300, 1500))
        # the same numbers on every rank: message r of this step
        base = torch.arange(n * n * size, dtype=torch.int32).view(n, n, size) + step
        kind, shift = choice.randrange(5), choice.randrange(n)
        assert torch.equal(found, wanted), f"step {step}"
        if kind == 0:
            found, wanted = comm.all_gather(base[rank]), base
        elif kind == 1:
            found, wanted = comm.all_to_all(base[rank]), base[:, rank]
        elif kind == 2:
            op = choice.choice(("max", "sum"))
            wanted = base.amax(dim=0) if op == "max" else base.sum(dim=0, dtype=torch.int32)
            found = comm.all_reduce(base[rank], op)
        elif kind == 3:
            found, wanted = comm.broadcast(base[rank]), base[0]
        else:
            found = comm.permute(base[rank], (rank + shift) % n, (rank - shift) % n)
            wanted = base[(rank - shift) % n]
    assert torch.equal(found, wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("machines", ["aa", "aaa"])
def test_thousands_of_exchanges_stay_in_order(machines):
    run_ranks(machines, exchange_at_random, use_small_boards)


def exchange_large(rank, owner):
    comm = owner.groups.node
    sizes = [CAPACITY // 4 + 1, 3 * CAPACITY // 4 + 5]
    for size in sizes:
        tensor = torch.arange(2 * size, dtype=torch.float32).view(2, size).t()  # not contiguous
        gathered = comm.all_gather(tensor + rank)
        assert all(torch.equal(gathered[r], tensor + r) for r in range(2))
        exchanged = comm.all_to_all(tensor.t() * (rank + 1))
        assert all(torch.equal(exchanged[r], tensor[:, rank] * (r + 1)) for r in range(2))
        assert torch.equal(comm.all_reduce(tensor, "sum"), 2 * tensor)
        assert torch.equal(comm.broadcast(tensor + rank), tensor)
        assert torch.equal(comm.permute(tensor + rank, 1 - rank, 1 - rank), tensor + 1 - rank)
    return comm.broadcast(torch.tensor(7 + rank)).item()


def test_large_messages_are_split():
    assert run_ranks("aa", exchange_large) == [7, 7]


def die_at_an_exchange(rank, owner):
    comm = owner.groups.node
    comm.all_gather(torch.ones(3))
    if comm.world_size == 1:
        return
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_gather(torch.ones(3))


@pytest.mark.parametrize(
    ("machines", "method"), [pytest.param("aaa", "spawn", marks=pytest.mark.extended), ("abb", "forkserver")]
)
def test_dead_rank_is_named_before_it_is_reaped(machines, method):
    processes = start_ranks(machines, die_at_an_exchange, method=method)
    for rank in range(2) if machines == "aaa" else [1]:
        error = processes[rank].result()
        assert isinstance(error, RankLost)
        assert error.rank == 2 and "exited" in error.reason
    assert method == "forkserver" or psutil.pid_exists(processes[2].process.pid), "it is still a zombie"
    assert [process.end() for process in processes] == [0, 0, -signal.SIGKILL]


def die_and_leave_a_child(rank, owner):
    comm = owner.groups.node
    comm.all_gather(torch.ones(3))
    if rank == 1:
        child = os.fork()
        if child == 0:
            signal.pause()
        owner.pipe.send(child)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_gather(torch.ones(3))


def test_dead_rank_with_a_living_forked_child_is_named():
    processes = start_ranks("aa", die_and_leave_a_child, timeout=5)
    child = processes[1].result()
    try:
        error = processes[0].result()
        assert psutil.Process(child).is_running()
    finally:
        os.kill(child, signal.SIGKILL)
    assert isinstance(error, RankLost)
    assert (error.rank, error.reason) == (1, "exited or left the group")
    assert [process.end() for process in processes] == [0, -signal.SIGKILL]


def come_late(rank, owner):
    comm = owner.groups.world
    comm.all_gather(torch.ones(3))
    if rank == 1:
        owner.pipe.recv()
        comm.all_gather(torch.ones(3))  # data that the others wrote before they failed is still there
    with pytest.raises(RankLost) as raised:
        comm.all_gather(torch.ones(3))
    with pytest.raises(RuntimeError, match="left"):
        comm.all_gather(torch.ones(3))
    return raised.value


def test_missing_rank_is_named_by_all():
    processes = start_ranks("aaa", come_late, timeout=2.5)
    errors = [processes[rank].result() for rank in (0, 2)]
    processes[1].send("come")
    errors.append(processes[1].result())
    assert [error.rank for error in errors] == [1, 1, 1]
    reasons = {error.reason for error in errors}
    assert reasons == {"did not join an exchange within 2.5 s", "another rank timed out waiting for it"}
    assert [process.end() for process in processes] == [0, 0, 0]


def send_unequal(rank, owner):
    with pytest.raises(CollectiveMismatch) as raised:
        owner.groups.world.all_gather(torch.ones(3 if rank else 5))
    return str(raised.value)


def test_unequal_messages_are_refused_on_every_rank():
    first, *others = run_ranks("aaa", send_unequal)
    reported = [f"rank {rank} sends {20 if rank == 0 else 12} bytes to all_gather" for rank in range(3)]
    assert first == f"messages differ: {reported[0]}, {reported[1]}"
    assert others == [f"messages differ: {reported[rank]}, {reported[0]}" for rank in (1, 2)]


OPERATIONS = {
    "all_gather": lambda comm: comm.all_gather(torch.ones(4)),
    "all_to_all": lambda comm: comm.all_to_all(torch.ones(2, 2)),
    "all_reduce of max": lambda comm: comm.all_reduce(torch.ones(4), "max"),
    "all_reduce of sum": lambda comm: comm.all_reduce(torch.ones(4), "sum"),
    "broadcast": lambda comm: comm.broadcast(torch.ones(4)),
    "permute": lambda comm: comm.permute(torch.ones(4), 1 - comm.rank, 1 - comm.rank),
}
PAIRS = list(combinations(OPERATIONS, 2))


def disagree(rank, owner):
    """Runs one operation of each pair in a separate segment; returns the errors."""
    reported = []
    for pair in PAIRS:
        comm = share_memory((0, 1), rank, agree, epoch=2, timeout=10)
        with pytest.raises(CollectiveMismatch) as raised:
            OPERATIONS[pair[rank]](comm)
        reported.append(str(raised.value))
    return reported


def agree(word):
    words = [None] * 2
    torch.distributed.all_gather_object(words, word)
    return words


def test_messages_of_equal_size_but_different_types_are_refused_on_every_rank():
    for pair, *reported in zip(PAIRS, *run_ranks("aa", disagree), strict=True):
        first, second = [f"rank {rank} sends 16 bytes to {kind}" for rank, kind in enumerate(pair)]
        assert reported == [f"messages differ: {first}, {second}", f"messages differ: {second}, {first}"]


def names_of_segments(rank, owner):
    owner.groups.world.all_reduce(torch.ones(1), "sum")  # leaving before the others have joined breaks the rendezvous
    owner.groups.node.broadcast(torch.ones(1))  # the rank that unlinks the name has done so
    owner.pipe.send(os.getpid())
    return [path.name for path in FOLDER.glob("longleaf-*")]


def test_segment_is_unlinked_once_all_have_joined():
    processes = start_ranks("aab", names_of_segments)
    pids = [process.result() for process in processes]
    found = [name for process in processes for name in process.result()]
    assert [process.end() for process in processes] == [0, 0, 0]
    assert not made_by(pids, found)


def made_by(pids, names):
    return [name for name in names if any(f"-{pid}-" in name for pid in pids)]


def make_and_wait(pipe):
    """The node's first rank, between the creation and the unlinking of its segment."""
    entrance = SegmentSetup((0, 1), 0, epoch=1, timeout=10)
    entrance.make()
    pipe.send(entrance.path)
    pipe.recv()


@pytest.fixture
def maker():
    """A process that has created a segment and waits; the path of the segment."""
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=make_and_wait, args=(theirs,))
    process.start()
    assert pipe.poll(60)
    path = pipe.recv()
    yield process, path
    process.kill()
    process.join()
    path.unlink(missing_ok=True)


def start_again():
    """The steps of a rank's restart, except the creation of its segment."""
    entrance = SegmentSetup((0, 1), 0, epoch=1, timeout=10)
    entrance.make()
    entrance.path.unlink()


def test_leftovers_of_a_killed_rank_are_removed_at_the_next_start(maker):
    process, path = maker
    start_again()
    assert path.exists(), "its owner is alive"
    process.kill()
    process.join()
    start_again()
    assert not path.exists()


def test_unreaped_process_counts_as_dead():
    process = subprocess.Popen(["sleep", "600"])
    assert started_at(process.pid) >= started_at(os.getpid())
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert started_at(process.pid) is None
    process.wait()
    assert started_at(process.pid) is None


@pytest.mark.parametrize("field", ["pid", "started", "namespace"])
def test_owner_is_identified_by_start_time_and_namespace(field):
    """Process ids are reused, and each namespace has its own."""
    here = ProcessIdentity.here()
    other = here._replace(**{field: 2**22 + 1 if field == "pid" else getattr(here, field) + 1})
    path = FOLDER / other.name(1)
    path.touch()
    try:
        start_again()
        assert path.exists() == (field == "namespace")
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["link", "folder", "another's", "another name"])
def test_only_leftovers_are_removed(kind, tmp_path):
    dead = ProcessIdentity.here()._replace(pid=2**22 + 1)
    path, target = FOLDER / dead.name(1), tmp_path / "target"
    target.touch()
    if kind == "link":
        path.symlink_to(target)
    elif kind == "folder":
        path.mkdir()
    elif kind == "another's":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        path.touch()
        os.chown(path, 12345, 12345)
    else:
        path = path.with_name(path.name + ".kept")
        path.touch()
    try:
        start_again()
        assert os.path.lexists(path)
        assert target.exists()
    finally:
        path.rmdir() if kind == "folder" else path.unlink()


class Warnings(logging.Handler):
    """Collects the messages that are logged while ranks join."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("longleaf.comm.shared_memory").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def lose_the_compiler(rank):
    Warnings()
    if rank == 1:
        os.environ["PATH"] = os.environ["XDG_CACHE_HOME"] = "/proc/nowhere"


def lack_room(rank):
    Warnings()
    if rank == 2:
        shared_memory.CAPACITY = 1 << 50


def fail_to_enter(rank):
    def enter(entrance, path):
        raise OSError("no map")

    Warnings()
    if rank == 1:
        shared_memory.SegmentSetup.enter = enter


def report_transport(rank, owner):
    handler = logging.getLogger("longleaf.comm.shared_memory").handlers[0]
    found = owner.groups.node.all_gather(torch.tensor([rank]))
    assert len(found) == owner.groups.node.world_size
    return owner.groups.world.transport, owner.groups.node.transport, handler.texts, os.getpid()


@pytest.mark.parametrize(
    ("machines", "prepare", "reason"),
    [
        ("aaa", lose_the_compiler, "rank 1: "),
        ("aab", lack_room, "rank 2: "),
        ("aaa", fail_to_enter, "rank 1: no map"),
    ],
)
def test_all_ranks_fall_back_together_and_one_logs_the_reason(machines, prepare, reason):
    results = run_ranks(machines, report_transport, prepare)
    assert [result[:2] for result in results] == [("gloo", "gloo")] * 3
    (text,), *others = [result[2] for result in results]
    assert reason in text and "gloo" in text
    assert others == [[], []]
    assert not made_by([result[3] for result in results], os.listdir(FOLDER))


def wrap_around(rank, owner):
    comm = owner.groups.node
    generation = ctypes.c_uint32.from_address(comm._place.meeting)
    if rank == 0:
        generation.value = 2**32 - 7
    owner.pipe.send("set")
    owner.pipe.recv()
    found = [comm.all_gather(torch.tensor([step * 10 + rank])).tolist() for step in range(20)]
    return found, generation.value


def test_step_number_may_wrap_around():
    processes = start_ranks("aa", wrap_around)
    assert [process.result() for process in processes] == ["set", "set"]
    for process in processes:
        process.send("go")
    wanted = [[[step * 10], [step * 10 + 1]] for step in range(20)]
    assert [process.result() for process in processes] == [(wanted, 13), (wanted, 13)]
    assert [process.end() for process in processes] == [0, 0]


def test_unsupported_messages_are_refused():
    comm = share_memory((0,), 0, lambda word: [word], epoch=1, timeout=10)
    with pytest.raises(ValueError, match="meta"):
        comm.all_gather(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="2 parts for 1 ranks"):
        comm.all_to_all(torch.zeros(2, 3))
    comm.close()
    with pytest.raises(RuntimeError, match="left"):
        comm.broadcast(torch.zeros(1))


def count_bytes(rank, owner):
    groups, (counter,) = counting(owner.groups)
    partial = random_partials(2, rows=4)[rank]
    counted = {}
    for name in MERGES:
        make_merge(name, groups, PartialCodec(NativeBackend())).to_all(partial)
        counted[name] = (counter.num_operations, counter.bytes_sent)
        counter.reset()
    groups.world.broadcast(torch.zeros(2))
    return counted, counter.bytes_sent


@pytest.mark.parametrize("shared", [True, False])
def test_merge_traffic_is_counted(shared):
    out, lse = 4 * 3 * 5 * 4, 4 * 3 * 4  # rows, heads, dim, bytes
    half = 4 * 2 * 6 * 4  # three heads in two parts: two heads each
    carrier = TransportChoice("shared_memory" if shared else "gloo")
    (counted, first), (same, second) = run_ranks("aa", count_bytes, carrier=carrier)
    packed = {
        "gather": (1, out + lse),
        "butterfly": (1, out + lse),
        "exchange": (2, 2 * half),
        "packed": (2, out + 2 * lse),
    }
    assert counted == same
    assert {name: counted[name] for name in packed} == packed
    assert counted["paper"] == (3, out + 2 * lse)
    assert (first, second) == (8, 0)
