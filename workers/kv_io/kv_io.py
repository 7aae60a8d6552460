"""Background saves and fetches of one rank, on separate threads: steps continue meanwhile.

A save first copies blocks to the host, which is short and belongs to an epoch: once the epoch has ended, no copy is
begun. The slow write to the storage uses the copy, so later changes of the blocks do not affect it.

Where steps and saves use the same cores, saves are throttled as long as there are steps: a lower priority keeps the
threads off the cores, but does not limit their memory bandwidth.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from longleaf.errors import DataLoss, LongleafError, NotFound, StorageUnavailable
from longleaf.rank_protocol.snapshots import Failure, Fetch, Fetched, Outcome, Save, Saved
from longleaf.storage.store import Store
from workers.kv_cache.slots import KvPool
from workers.kv_io.io_queue import Clock, IoQueue
from workers.kv_io.kv_piece import HostCopy, KvPiece

NUM_THREADS = 2
NICENESS = 15
"""The niceness of these threads and of the threads they start: decoding has priority."""
REST = 1.8
"""Pause after a save, as a multiple of its duration, while steps run on the same cores."""
MAX_REST_SECONDS = 0.5
"""Upper limit of a pause: longer saves have waited for the storage, which does not slow down steps."""
BUSY_SECONDS = 0.5
"""Seconds after a step during which another one is expected."""
MAX_REASON_CHARACTERS = 1024
OpenStore = Callable[[str], Store]
"""Opens the storage at a URL. Raises StorageUnavailable, and InvalidArgument for an invalid URL."""
Answer = Callable[[Outcome], None]
"""Sends the outcome of an order. Any thread may call it."""
ENDED = Failure("dropped", "the epoch has ended")
NOT_RESIDENT = Failure("dropped", "the rank does not have it")
DISCARDED = Failure("dropped", "it was discarded")
log = logging.getLogger(__name__)


class KvIo:
    """Executes orders of the step thread, which waits only in `end_epoch`, for the copy of a piece.

    Each order is answered once, unless the object is closed before.
    """

    def __init__(
        self, member: int, url: str | None, open_store: OpenStore, device: str, clock: Clock = time.monotonic
    ) -> None:
        """Without `url` there is no storage, and all orders fail. `clock` counts seconds."""
        self._member = member
        self._clock = clock
        self._url = url
        self._open = open_store
        self._device = device
        self._store: Store | None = None
        self._opening = threading.Lock()
        self._copying = threading.Lock()
        self._num_epochs = 0
        """The number of ended epochs. `end_epoch` increments it before it waits for `_copying`."""
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._wanted = set[int]()
        """Tickets of unanswered fetches that were not discarded."""
        self._pieces: dict[int, KvPiece] = {}
        self._is_stepping = False
        self._stepped = float("-inf")
        """The time at which the last step ended."""
        self._orders = IoQueue(clock, lambda: self._limited(MAX_REST_SECONDS))  # one save at a time
        self._threads = [threading.Thread(target=self._work, name="snapshots", daemon=True) for _ in range(NUM_THREADS)]

    # --- the step thread ---

    @contextmanager
    def beside_step(self) -> Generator[None, None, None]:
        """Marks the execution of a step."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._stepped, self._is_stepping = self._clock(), False

    def save(self, order: Save, pool: KvPool, answer: Answer) -> None:
        """Writes blocks of the pool to the storage, unless the epoch ends before the copy is begun."""
        self._orders.put_save(partial(self._save, order, pool, self._num_epochs, answer))
        self._begin()

    def fetch(self, order: Fetch, pool: KvPool, answer: Answer) -> None:
        """Reads a piece for pools of this form."""
        with self._lock:
            self._wanted.add(order.ticket)
        self._orders.put_fetch(lambda: answer(self._fetched(order, pool)))
        self._begin()

    def _begin(self) -> None:
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def discard(self, tickets: Sequence[int]) -> None:
        """Drops fetched pieces and cancels pending fetches. Saves have separate tickets."""
        with self._lock:
            for ticket in tickets:
                self._wanted.discard(ticket)
                self._pieces.pop(ticket, None)

    def piece(self, ticket: int) -> KvPiece | None:
        """A fetched piece, unless it was discarded."""
        with self._lock:
            return self._pieces.get(ticket)

    def end_epoch(self) -> None:
        """Returns once no block is being read for a save. Saves ordered before will not read blocks afterwards."""
        self._num_epochs += 1
        with self._copying:
            pass

    def close(self) -> None:
        """Drops queued orders, without waiting for running ones: the storage may be slow. Idempotent."""
        self._orders.close()

    # --- the worker threads ---

    def _work(self) -> None:
        with suppress(OSError):  # threads have separate priorities only on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        if self._device.startswith("cuda"):  # each thread has a separate current device
            torch.cuda.set_device(self._device)
        while work := self._orders.get():
            work()

    def _save(self, order: Save, pool: KvPool, epoch: int, answer: Answer) -> None:
        began = self._clock()
        saved = self._saved(order, pool, epoch)
        self._orders.pause_saves(self._limited(REST * (self._clock() - began)))
        answer(saved)

    def _limited(self, rest: float) -> float:
        """The pause of saves in seconds: at most `rest`, and 0 unless steps run on the same cores."""
        has_steps = self._is_stepping or self._clock() - self._stepped < BUSY_SECONDS
        return min(rest, MAX_REST_SECONDS) if has_steps and self._device == "cpu" else 0.0

    def _saved(self, order: Save, pool: KvPool, epoch: int) -> Saved:
        try:
            with self._copying:
                if epoch != self._num_epochs:
                    return Saved(self._member, order.ticket, failure=ENDED)
                copy = HostCopy(pool, order.runs, of_windows=order.of_windows)
            written = self._opened().put(order.name, copy.parts())
            return Saved(self._member, order.ticket, written.num_bytes, written.digest)
        except Exception as error:
            return Saved(self._member, order.ticket, failure=failure_of(error))

    def _fetched(self, order: Fetch, pool: KvPool) -> Fetched:
        failure = None if self._is_wanted(order) else DISCARDED
        try:
            if failure is None:
                data = self._opened().get(order.name, order.digest)
                if len(data) != order.num_bytes:
                    raise DataLoss(order.name, f"it has {len(data)} bytes, expected {order.num_bytes}")
                failure = self._keep(order, data, pool)
        except Exception as error:
            failure = failure_of(error)
        finally:
            with self._lock:
                self._wanted.discard(order.ticket)
        return Fetched(self._member, order.ticket, failure)

    def _keep(self, order: Fetch, data: bytes, pool: KvPool) -> Failure | None:
        if not self._is_wanted(order):  # checked again after the storage's answer, because parsing takes time
            return DISCARDED
        piece = KvPiece(order.name, data, pool, order.ranges, of_windows=order.of_windows)
        with self._lock:
            if order.ticket not in self._wanted:
                return DISCARDED
            self._pieces[order.ticket] = piece
        return None

    def _is_wanted(self, order: Fetch) -> bool:
        with self._lock:
            return order.ticket in self._wanted

    def _opened(self) -> Store:
        """Opens the storage on first use. Errors of the storage are raised, and the next order tries again."""
        if self._url is None:
            raise StorageUnavailable("snapshot_url: none was given")
        with self._opening:
            self._store = self._store or self._open(self._url)
            return self._store


def failure_of(error: Exception) -> Failure:
    match error:
        case DataLoss():
            return Failure("damaged", error.reason[:MAX_REASON_CHARACTERS])
        case NotFound():
            return Failure("damaged", "it is not there")
        case LongleafError():
            return Failure("unavailable", str(error)[:MAX_REASON_CHARACTERS])
        case _:
            log.error("cannot read or write a piece", exc_info=error)
            return Failure("unavailable", f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS])
