"""Saves and fetches beside the steps, with a slow, full or damaged storage, the end of an epoch, and cancellations."""

import queue
import threading
import time

import pytest
import torch

from longleaf.rank_protocol.snapshots import Failure, Fetch, Fetched, Save, Saved
from longleaf.runs import Run
from tests.support.pools import BLOCK, POOLS, filled
from workers.kv_cache.block_bytes import Content
from workers.kv_io import kv_io as desks
from workers.kv_io.fakes import FolderStore, nowhere
from workers.kv_io.kv_io import BUSY_SECONDS, DISCARDED, ENDED, NUM_THREADS, REST, KvIo
from workers.kv_io.kv_piece import HostCopy, KvPiece

RUNS = (Run(0, 0, 6, (3, 1)),)
RANGES = ((0, 6),)
SECONDS = 30


class World:
    def __init__(self, folder, url="here", open_store=None, device="cpu", clock=time.monotonic):
        self.store = FolderStore(str(folder))
        self.pool = filled(POOLS["plain"], 1)
        self.answers = queue.Queue()
        self.desk = KvIo(5, url, open_store or (lambda _: self.store), device, clock)

    def save(self, ticket):
        self.desk.save(Save(ticket, f"pieces/{ticket}", 0, RUNS), self.pool, self.answers.put)

    def fetch(self, ticket, saved, name=None):
        order = Fetch(ticket, name or f"pieces/{saved.ticket}", saved.num_bytes, saved.digest, RANGES)
        self.desk.fetch(order, self.pool, self.answers.put)

    def wait_for_calls(self, count):
        """Returns when this number of calls has begun, of those that were not waited for before."""
        for _ in range(count):
            assert self.store.num_calls.acquire(timeout=SECONDS)

    def answer(self):
        return self.answers.get(timeout=SECONDS)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.store.gate.set()
    made.desk.close()


def test_what_is_saved_is_fetched(world, tmp_path):
    world.save(1)
    saved = world.answer()
    data = (tmp_path / "pieces/1").read_bytes()
    assert (saved.member, saved.ticket, saved.num_bytes, saved.failure) == (5, 1, len(data), None)
    assert data == b"".join(HostCopy(world.pool, RUNS, of_windows=False).parts())
    world.fetch(7, saved)
    assert world.answer() == Fetched(5, 7)
    piece = world.desk.piece(7)
    assert isinstance(piece, KvPiece)
    target = filled(POOLS["plain"], 2)
    piece.restore(target, piece.find(RUNS, BLOCK), [0, 2])
    assert torch.equal(Content(target).export([0, 2]), Content(world.pool).export([3, 1]))
    world.desk.end_epoch()
    assert world.desk.piece(7) is piece
    world.desk.discard([7, 8])
    assert world.desk.piece(7) is None


def test_a_slow_storage_holds_up_nobody_at_an_epochs_end(world):
    """Data that was copied by then is written unchanged; the rest is dropped."""
    world.store.gate.clear()
    before = b"".join(HostCopy(world.pool, RUNS, of_windows=False).parts())
    for ticket in range(NUM_THREADS + 2):
        world.save(ticket)
    world.wait_for_calls(NUM_THREADS)
    world.desk.end_epoch()
    for part in world.pool.blocks(of_windows=False):
        part.tensor.zero_()  # others have the blocks now
    world.store.gate.set()
    answers = sorted((world.answer() for _ in range(NUM_THREADS + 2)), key=lambda saved: saved.ticket)
    assert [saved.failure for saved in answers] == [None] * NUM_THREADS + [ENDED] * 2
    for saved in answers[:NUM_THREADS]:
        assert world.store.get(f"pieces/{saved.ticket}", saved.digest) == before
    world.save(9)
    assert world.answer().failure is None


def test_who_ends_an_epoch_waits_for_the_copy_alone(world, monkeypatch):
    began, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class SlowCopy(HostCopy):
        def __init__(self, *args, **options):
            began.set()
            may_go_on.wait(SECONDS)
            super().__init__(*args, **options)

    monkeypatch.setattr(desks, "HostCopy", SlowCopy)
    for ticket in (0, 1):
        world.save(ticket)
    assert began.wait(SECONDS)
    threading.Thread(target=lambda: (world.desk.end_epoch(), ended.set()), daemon=True).start()
    while not world.desk._num_epochs:
        pass
    assert not ended.is_set()
    may_go_on.set()
    assert ended.wait(SECONDS)
    assert sorted(str(world.answer().failure) for _ in range(2)) == sorted([str(None), str(ENDED)])


def test_what_is_discarded_is_not_begun_and_not_kept(world):
    world.save(0)
    saved = world.answer()
    world.wait_for_calls(1)
    world.store.gate.clear()
    for ticket in range(1, NUM_THREADS + 1):
        world.fetch(ticket, saved)
    world.wait_for_calls(NUM_THREADS)
    world.fetch(8, saved)
    world.save(9)
    world.desk.discard([1, 8, 9])  # and no save, though it has the ticket of a fetch
    world.store.gate.set()
    answers = {(type(found), found.ticket): found.failure for found in (world.answer() for _ in range(NUM_THREADS + 2))}
    assert answers == {(Fetched, 1): DISCARDED, (Fetched, 2): None, (Fetched, 8): DISCARDED, (Saved, 9): None}
    assert [world.desk.piece(ticket) is None for ticket in (1, 2, 8)] == [True, False, True]
    world.wait_for_calls(1)
    assert not world.store.num_calls.acquire(blocking=False)


def test_what_is_discarded_while_it_is_read_is_not_parsed(world, monkeypatch):
    world.save(0)
    saved = world.answer()
    world.wait_for_calls(1)
    parsed = []
    monkeypatch.setattr(desks, "KvPiece", lambda *_, **__: parsed.append(1))
    world.store.gate.clear()
    world.fetch(1, saved)
    world.wait_for_calls(1)
    world.desk.discard([1])
    world.store.gate.set()
    assert world.answer() == Fetched(5, 1, DISCARDED)
    assert not parsed


def test_a_piece_that_its_manifest_does_not_describe_is_damaged_when_it_is_fetched(world):
    world.save(0)
    saved = world.answer()
    for ticket, order in enumerate(
        [
            Fetch(1, "pieces/0", saved.num_bytes, saved.digest, ((0, 5),)),
            Fetch(2, "pieces/0", saved.num_bytes, saved.digest, RANGES, True),
        ],
        1,
    ):
        world.desk.fetch(order, world.pool, world.answers.put)
        assert world.answer().failure.trouble == "damaged"
        assert world.desk.piece(ticket) is None


def test_each_trouble_is_told_as_what_it_is(world, tmp_path):
    world.save(0)
    saved = world.answer()
    path = tmp_path / "pieces/0"
    data = path.read_bytes()
    world.fetch(1, saved, "pieces/none")
    assert world.answer() == Fetched(5, 1, Failure("damaged", "it is not there"))
    path.write_bytes(data[:-1] + b"x")
    world.fetch(2, saved)
    assert world.answer() == Fetched(5, 2, Failure("damaged", "its content does not match its checksum"))
    path.write_bytes(data)
    world.fetch(3, Saved(5, 0, saved.num_bytes + 1, saved.digest))
    assert world.answer().failure.trouble == "damaged"
    world.store.trouble = "the disk is full"
    world.save(4)
    assert world.answer() == Saved(5, 4, failure=Failure("unavailable", "the disk is full"))
    world.store.trouble = ""
    world.fetch(5, saved)
    assert world.answer() == Fetched(5, 5)


@pytest.mark.parametrize(("device", "since_step"), [("cpu", BUSY_SECONDS), ("cuda:0", 0.0)])
def test_saves_need_no_rest_without_steps_on_the_same_cores(tmp_path, monkeypatch, device, since_step):
    now = [100.0]
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    world = World(tmp_path, device=device, clock=lambda: now[0])
    world.store.gate.clear()
    with world.desk.beside_step():
        pass
    now[0] += since_step
    for ticket in range(NUM_THREADS):
        world.save(ticket)
    world.wait_for_calls(NUM_THREADS)
    world.store.gate.set()
    assert [world.answer().failure for _ in range(NUM_THREADS)] == [None] * NUM_THREADS
    world.desk.close()


def test_beside_steps_one_is_saved_at_a_time_and_then_there_is_a_rest(tmp_path):
    now, seconds = [100.0], 0.1
    world = World(tmp_path, clock=lambda: now[0])
    world.store.gate.clear()
    with world.desk.beside_step():
        now[0] += 3600.0
        for ticket in range(NUM_THREADS):
            world.save(ticket)
        world.wait_for_calls(1)
    assert not world.store.num_calls.acquire(timeout=0.1)
    now[0] += seconds
    world.store.gate.set()
    assert world.answer().failure is None
    assert not world.store.num_calls.acquire(timeout=0.1)
    now[0] += REST * seconds + 1e-6
    world.fetch(9, Saved(5, 0, 1, "0" * 64), "pieces/none")  # wakes a thread, which sees that its time is up
    world.wait_for_calls(NUM_THREADS)
    assert {world.answer().ticket for _ in range(NUM_THREADS)} > {9}
    world.desk.close()


def test_a_mistake_is_told_and_ends_no_thread(world, caplog):
    for ticket in range(2 * NUM_THREADS):
        world.desk.save(Save(ticket, "p", 0, (Run(0, 0, 3, (999,)),)), world.pool, world.answers.put)
    for _ in range(2 * NUM_THREADS):
        assert world.answer().failure.trouble == "unavailable"
    world.save(9)
    assert world.answer().failure is None
    assert "cannot read or write a piece" in caplog.text


@pytest.mark.parametrize(("url", "reported"), [(None, "none was given"), ("s3://there", "s3://there: nothing is kept")])
def test_where_there_is_no_storage_orders_fail(tmp_path, url, reported):
    world = World(tmp_path, url, nowhere)
    world.save(0)
    assert reported in world.answer().failure.reason
    world.desk.close()


def test_a_storage_that_cannot_be_opened_is_tried_again(tmp_path):
    tries = []

    def open_store(url):
        tries.append(url)
        return nowhere(url) if len(tries) == 1 else FolderStore(str(tmp_path))

    world = World(tmp_path, "x", open_store)
    for outage in ("unavailable", None, None):
        world.save(0)
        failure = world.answer().failure
        assert (failure and failure.trouble) == outage
    assert tries == ["x", "x"]
    world.desk.close()


def test_without_orders_there_are_no_threads(tmp_path):
    world = World(tmp_path)
    threads = world.desk._threads
    assert [thread.is_alive() for thread in threads] == [False] * NUM_THREADS
    world.save(0)
    world.answer()
    assert [thread.is_alive() for thread in threads] == [True] * NUM_THREADS
    world.desk.close()
    for thread in threads:
        thread.join(SECONDS)
    assert [thread.is_alive() for thread in threads] == [False] * NUM_THREADS
