"""Saves and fetches of one rank, on threads of their own: steps go on meanwhile.

A save first copies blocks to the host, which is short and belongs to an epoch: once that has ended, no copy is begun.
Then the storage takes its time, and what it gets is right whatever happens to the blocks.

Where steps are computed by the cores that save, saves take breaks as long as there are steps: a lower priority keeps
threads off the cores, but not off the memory that both read.
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
from workers.kv_cache.slots import KvPool
from workers.kv_io.io_queue import Clock, IoQueue
from workers.kv_io.kv_piece import HostCopy, KvPiece
from workers.kv_io.store import OpenStore, PieceStore

NUM_THREADS = 2
NICENESS = 15
"""Of these threads, and of those that they start: what decodes goes first."""
REST = 1.8
"""How long saves rest after one, in its own seconds, while there are steps on the same cores."""
MAX_REST_SECONDS = 0.5
"""Longer ones have waited for the storage, which takes nothing from steps."""
BUSY_SECONDS = 0.5
"""From the end of a step on the next one is expected."""
MAX_REASON_CHARACTERS = 1024
Answer = Callable[[Outcome], None]
"""Sends what has become of an order. Any thread may call it."""
ENDED = Failure("dropped", "the epoch has ended")
NOT_HELD = Failure("dropped", "the rank does not hold it")
DISCARDED = Failure("dropped", "it was discarded")
log = logging.getLogger(__name__)


class KvIo:
    """Takes orders from the thread of the steps, which never waits here but for the copy of a piece, at an epoch's end.

    Each order is answered once, unless the desk is closed before.
    """

    def __init__(
        self, member: int, url: str | None, open_store: OpenStore, device: str, clock: Clock = time.monotonic
    ) -> None:
        """`url` None: there is no storage, and all orders fail. `clock` counts seconds."""
        self._member = member
        self._clock = clock
        self._url = url
        self._open = open_store
        self._device = device
        self._store: PieceStore | None = None
        self._opening = threading.Lock()
        self._copying = threading.Lock()
        self._num_epochs = 0
        """That have ended. Changes before who ends one waits for `_copying`."""
        self._lock = threading.Lock()
        """Of what follows."""
        self._wanted = set[int]()
        """Tickets of fetches that are not answered, unless they were discarded."""
        self._pieces: dict[int, KvPiece] = {}
        self._is_stepping = False
        self._stepped = float("-inf")
        """When the last step has ended."""
        self._orders = IoQueue(clock, lambda: self._limited(MAX_REST_SECONDS))  # one save at a time
        self._threads = [threading.Thread(target=self._work, name="snapshots", daemon=True) for _ in range(NUM_THREADS)]

    # --- the thread of the steps ---

    @contextmanager
    def beside_step(self) -> Generator[None, None, None]:
        """A step is computed."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._stepped, self._is_stepping = self._clock(), False

    def save(self, order: Save, pool: KvPool, answer: Answer) -> None:
        """Writes what lies in blocks of the pool, unless the epoch ends before it is begun."""
        self._orders.put_save(partial(self._save, order, pool, self._num_epochs, answer))
        self._begin()

    def fetch(self, order: Fetch, pool: KvPool, answer: Answer) -> None:
        """Reads a piece for pools like this one."""
        with self._lock:
            self._wanted.add(order.ticket)
        self._orders.put_fetch(lambda: answer(self._fetched(order, pool)))
        self._begin()

    def _begin(self) -> None:
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def discard(self, tickets: Sequence[int]) -> None:
        """Forgets what was fetched, and what is not fetched yet. Saves have tickets of their own."""
        with self._lock:
            for ticket in tickets:
                self._wanted.discard(ticket)
                self._pieces.pop(ticket, None)

    def piece(self, ticket: int) -> KvPiece | None:
        """What was fetched, and is not discarded."""
        with self._lock:
            return self._pieces.get(ticket)

    def end_epoch(self) -> None:
        """Returns when no block is being read, and none will be for a save that was ordered before."""
        self._num_epochs += 1
        with self._copying:
            pass

    def close(self) -> None:
        """Waits for nobody: a storage may take its time. Idempotent."""
        self._orders.close()

    # --- its own threads ---

    def _work(self) -> None:
        with suppress(OSError):  # elsewhere than on Linux threads are no processes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        if self._device.startswith("cuda"):  # each thread has a current one of its own
            torch.cuda.set_device(self._device)
        while work := self._orders.take():
            work()

    def _save(self, order: Save, pool: KvPool, epoch: int, answer: Answer) -> None:
        began = self._clock()
        saved = self._saved(order, pool, epoch)
        self._orders.rest(self._limited(REST * (self._clock() - began)))
        answer(saved)

    def _limited(self, rest: float) -> float:
        """How long saves rest that should rest so long, in seconds: only if steps are computed by the same cores."""
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
                    raise DataLoss(order.name, f"it has {len(data)} bytes instead of {order.num_bytes}")
                failure = self._keep(order, data, pool)
        except Exception as error:
            failure = failure_of(error)
        finally:
            with self._lock:
                self._wanted.discard(order.ticket)
        return Fetched(self._member, order.ticket, failure)

    def _keep(self, order: Fetch, data: bytes, pool: KvPool) -> Failure | None:
        if not self._is_wanted(order):  # a storage may take its time, and the rest takes more of it
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

    def _opened(self) -> PieceStore:
        """Raises what the storage raises; then it is tried again with the next order."""
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
            log.error("a piece was neither written nor read", exc_info=error)
            return Failure("unavailable", f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS])
