"""Saves and fetches beside the steps, with a slow, full or damaged storage, the end of an epoch, and cancellations."""

import queue
import threading
import time

import pytest
import torch

from longleaf.rank_protocol.snapshots import Failure, Fetch, Fetched, Save, Saved
from longleaf.runs import Run
from tests.support.fakes.kv_store import FolderStore, no_store
from tests.support.pools import POOLS, filled
from workers.kv_io import kv_io as desks
from workers.kv_io.kv_io import BUSY_SECONDS, DISCARDED, ENDED, NUM_THREADS, REST, KvIo
from workers.kv_io.kv_piece import HostCopy, KvPiece
from workers.runners.kv_transfer import Content

RUNS = (Run(0, 0, 6, (3, 1)),)
RANGES = ((0, 6),)
SECONDS = 30


class IoBench:
    def __init__(self, folder, url="here", open_store=None, device="cpu", clock=time.monotonic):
        self.store = FolderStore(str(folder))
        self.pool = filled(POOLS["plain"], 1)
        self.answers = queue.Queue()
        self.kv_io = KvIo(5, url, open_store or (lambda _: self.store), device, clock)

    def save(self, ticket):
        self.kv_io.save(Save(ticket, f"pieces/{ticket}", 0, RUNS), self.pool, self.answers.put)

    def fetch(self, ticket, saved, name=None):
        order = Fetch(ticket, name or f"pieces/{saved.ticket}", saved.num_bytes, saved.digest, RANGES)
        self.kv_io.fetch(order, self.pool, self.answers.put)

    def wait_for_calls(self, count):
        """Returns when this number of further calls has started."""
        for _ in range(count):
            assert self.store.num_calls.acquire(timeout=SECONDS)

    def answer(self):
        return self.answers.get(timeout=SECONDS)


@pytest.fixture
def bench(tmp_path):
    made = IoBench(tmp_path)
    yield made
    made.store.gate.set()
    made.kv_io.close()


def test_saved_piece_is_fetched(bench, tmp_path):
    bench.save(1)
    saved = bench.answer()
    data = (tmp_path / "pieces/1").read_bytes()
    assert (saved.member, saved.ticket, saved.num_bytes, saved.failure) == (5, 1, len(data), None)
    assert data == b"".join(HostCopy(bench.pool, RUNS, of_windows=False).parts())
    bench.fetch(7, saved)
    assert bench.answer() == Fetched(5, 7)
    piece = bench.kv_io.piece(7)
    assert isinstance(piece, KvPiece)
    target = filled(POOLS["plain"], 2)
    piece.restore(target, piece.find(RUNS), [0, 2])
    assert torch.equal(Content(target).export([0, 2]), Content(bench.pool).export([3, 1]))
    bench.kv_io.end_epoch()
    assert bench.kv_io.piece(7) is piece
    bench.kv_io.discard([7, 8])
    assert bench.kv_io.piece(7) is None


def test_slow_storage_does_not_delay_the_end_of_an_epoch(bench):
    """Data that was copied by then is written unchanged; the rest is dropped."""
    bench.store.gate.clear()
    before = b"".join(HostCopy(bench.pool, RUNS, of_windows=False).parts())
    for ticket in range(NUM_THREADS + 2):
        bench.save(ticket)
    bench.wait_for_calls(NUM_THREADS)
    bench.kv_io.end_epoch()
    for part in bench.pool.blocks(of_windows=False):
        part.tensor.zero_()  # other segments use the blocks now
    bench.store.gate.set()
    answers = sorted((bench.answer() for _ in range(NUM_THREADS + 2)), key=lambda saved: saved.ticket)
    assert [saved.failure for saved in answers] == [None] * NUM_THREADS + [ENDED] * 2
    for saved in answers[:NUM_THREADS]:
        assert bench.store.get(f"pieces/{saved.ticket}", saved.digest) == before
    bench.save(9)
    assert bench.answer().failure is None


def test_end_of_an_epoch_waits_only_for_the_copy(bench, monkeypatch):
    began, may_continue, ended = threading.Event(), threading.Event(), threading.Event()

    class SlowCopy(HostCopy):
        def __init__(self, *args, **options):
            began.set()
            may_continue.wait(SECONDS)
            super().__init__(*args, **options)

    monkeypatch.setattr(desks, "HostCopy", SlowCopy)
    for ticket in (0, 1):
        bench.save(ticket)
    assert began.wait(SECONDS)
    threading.Thread(target=lambda: (bench.kv_io.end_epoch(), ended.set()), daemon=True).start()
    while not bench.kv_io._num_epochs:
        pass
    assert not ended.is_set()
    may_continue.set()
    assert ended.wait(SECONDS)
    assert sorted(str(bench.answer().failure) for _ in range(2)) == sorted([str(None), str(ENDED)])


def test_discarded_fetch_is_not_started_and_not_retained(bench):
    bench.save(0)
    saved = bench.answer()
    bench.wait_for_calls(1)
    bench.store.gate.clear()
    for ticket in range(1, NUM_THREADS + 1):
        bench.fetch(ticket, saved)
    bench.wait_for_calls(NUM_THREADS)
    bench.fetch(8, saved)
    bench.save(9)
    bench.kv_io.discard([1, 8, 9])  # and no save, although it has the ticket of a fetch
    bench.store.gate.set()
    answers = {(type(found), found.ticket): found.failure for found in (bench.answer() for _ in range(NUM_THREADS + 2))}
    assert answers == {(Fetched, 1): DISCARDED, (Fetched, 2): None, (Fetched, 8): DISCARDED, (Saved, 9): None}
    assert [bench.kv_io.piece(ticket) is None for ticket in (1, 2, 8)] == [True, False, True]
    bench.wait_for_calls(1)
    assert not bench.store.num_calls.acquire(blocking=False)


def test_piece_discarded_during_a_read_is_not_parsed(bench, monkeypatch):
    bench.save(0)
    saved = bench.answer()
    bench.wait_for_calls(1)
    parsed = []
    monkeypatch.setattr(desks, "KvPiece", lambda *_, **__: parsed.append(1))
    bench.store.gate.clear()
    bench.fetch(1, saved)
    bench.wait_for_calls(1)
    bench.kv_io.discard([1])
    bench.store.gate.set()
    assert bench.answer() == Fetched(5, 1, DISCARDED)
    assert not parsed


def test_piece_that_differs_from_its_manifest_is_damaged(bench):
    bench.save(0)
    saved = bench.answer()
    for ticket, order in enumerate(
        [
            Fetch(1, "pieces/0", saved.num_bytes, saved.digest, ((0, 5),)),
            Fetch(2, "pieces/0", saved.num_bytes, saved.digest, RANGES, True),
        ],
        1,
    ):
        bench.kv_io.fetch(order, bench.pool, bench.answers.put)
        assert bench.answer().failure.kind == "damaged"
        assert bench.kv_io.piece(ticket) is None


def test_each_kind_of_failure_is_reported(bench, tmp_path):
    bench.save(0)
    saved = bench.answer()
    path = tmp_path / "pieces/0"
    data = path.read_bytes()
    bench.fetch(1, saved, "pieces/none")
    assert bench.answer() == Fetched(5, 1, Failure("damaged", "it is not there"))
    path.write_bytes(data[:-1] + b"x")
    bench.fetch(2, saved)
    assert bench.answer() == Fetched(5, 2, Failure("damaged", "its content does not match its checksum"))
    path.write_bytes(data)
    bench.fetch(3, Saved(5, 0, saved.num_bytes + 1, saved.digest))
    assert bench.answer().failure.kind == "damaged"
    bench.store.error = "the disk is full"
    bench.save(4)
    assert bench.answer() == Saved(5, 4, failure=Failure("unavailable", "the disk is full"))
    bench.store.error = ""
    bench.fetch(5, saved)
    assert bench.answer() == Fetched(5, 5)


@pytest.mark.parametrize(("device", "since_step"), [("cpu", BUSY_SECONDS), ("cuda:0", 0.0)])
def test_saves_need_no_pause_without_steps_on_the_same_cores(tmp_path, monkeypatch, device, since_step):
    now = [100.0]
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    bench = IoBench(tmp_path, device=device, clock=lambda: now[0])
    bench.store.gate.clear()
    with bench.kv_io.beside_step():
        pass
    now[0] += since_step
    for ticket in range(NUM_THREADS):
        bench.save(ticket)
    bench.wait_for_calls(NUM_THREADS)
    bench.store.gate.set()
    assert [bench.answer().failure for _ in range(NUM_THREADS)] == [None] * NUM_THREADS
    bench.kv_io.close()


def test_saves_beside_steps_run_one_by_one_with_pauses(tmp_path):
    now, seconds = [100.0], 0.1
    bench = IoBench(tmp_path, clock=lambda: now[0])
    bench.store.gate.clear()
    with bench.kv_io.beside_step():
        now[0] += 3600.0
        for ticket in range(NUM_THREADS):
            bench.save(ticket)
        bench.wait_for_calls(1)
    assert not bench.store.num_calls.acquire(timeout=0.1)
    now[0] += seconds
    bench.store.gate.set()
    assert bench.answer().failure is None
    assert not bench.store.num_calls.acquire(timeout=0.1)
    now[0] += REST * seconds + 1e-6
    bench.fetch(9, Saved(5, 0, 1, "0" * 64), "pieces/none")  # notifies a thread, whose pause has ended
    bench.wait_for_calls(NUM_THREADS)
    assert {bench.answer().ticket for _ in range(NUM_THREADS)} > {9}
    bench.kv_io.close()


def test_unexpected_error_is_reported_and_ends_no_thread(bench, caplog):
    for ticket in range(2 * NUM_THREADS):
        bench.kv_io.save(Save(ticket, "p", 0, (Run(0, 0, 3, (999,)),)), bench.pool, bench.answers.put)
    for _ in range(2 * NUM_THREADS):
        assert bench.answer().failure.kind == "unavailable"
    bench.save(9)
    assert bench.answer().failure is None
    assert "cannot read or write a piece" in caplog.text


@pytest.mark.parametrize(("url", "reported"), [(None, "none was given"), ("s3://there", "s3://there: nothing is kept")])
def test_requests_without_storage_fail(tmp_path, url, reported):
    bench = IoBench(tmp_path, url, no_store)
    bench.save(0)
    assert reported in bench.answer().failure.reason
    bench.kv_io.close()


def test_open_of_the_storage_is_retried(tmp_path):
    tries = []

    def open_store(url):
        tries.append(url)
        return no_store(url) if len(tries) == 1 else FolderStore(str(tmp_path))

    bench = IoBench(tmp_path, "x", open_store)
    for outage in ("unavailable", None, None):
        bench.save(0)
        failure = bench.answer().failure
        assert (failure and failure.kind) == outage
    assert tries == ["x", "x"]
    bench.kv_io.close()


def test_no_threads_without_requests(tmp_path):
    bench = IoBench(tmp_path)
    threads = bench.kv_io._threads
    assert [thread.is_alive() for thread in threads] == [False] * NUM_THREADS
    bench.save(0)
    bench.answer()
    assert [thread.is_alive() for thread in threads] == [True] * NUM_THREADS
    bench.kv_io.close()
    for thread in threads:
        thread.join(SECONDS)
    assert [thread.is_alive() for thread in threads] == [False] * NUM_THREADS
