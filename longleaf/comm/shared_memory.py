"""The Comm of CPU ranks of one machine: processes that exchange tensors through shared memory.

A segment is a file in /dev/shm with a header and two boards. In every step each rank writes its message to one board,
all ranks synchronize, and all read it (shm_rendezvous.c explains why this suffices). Results are views of the board,
valid until this rank's next operation. Messages larger than a rank's share of a board are sent in pieces and copied
out.
"""

import ctypes
import functools
import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.comm.base import ReduceOp, Transport
from longleaf.comm.shm_cleanup import FOLDER, ProcessIdentity, sweep
from longleaf.comm.shm_rendezvous import KIND_BITS, Kind, Library, ShmMember, Status
from longleaf.errors import CollectiveMismatch, ExchangeAborted, RankLost
from longleaf.formatting import human_seconds
from longleaf.resources import num_processors

CAPACITY = 1 << 20
"""Bytes of each rank's share of a board. A container's default of 64 MiB of shared memory suffices for 31 ranks."""
SPIN_NS = 50_000
"""Time of busy waiting before sleeping, if every rank has a CPU."""
SLICE_NS = 50_000_000
"""Interval at which a sleeping rank checks the other ranks and handles signals."""

log = logging.getLogger(__name__)


class Route(NamedTuple):
    """The reads and writes of an operation. Part p of the message of rank r is number p * N + r on the board."""

    kind: int
    """The Kind as an int: routes are looked up in every exchange, and hashing an enum member is slower."""
    num_parts: int
    """Number of parts of a message; equal on all ranks."""
    is_writing: bool
    first: int
    """Number of the first part that this rank reads."""
    num_read: int


class JoinMessage(NamedTuple):
    """Message from a rank to the others during setup."""

    path: str
    problem: str
    """Reason why the rank cannot use shared memory; empty if it can."""


Agree = Callable[[JoinMessage], Sequence[JoinMessage]]
"""Exchanges the messages of all ranks of the world, returned in order."""


class SharedMemoryComm:
    """One rank's handle of a segment. `members` are the world ranks of its members, in order."""

    def __init__(self, library: Library, file: int, members: Sequence[int], rank: int, timeout: float) -> None:
        """Maps and enters the segment open as `file`, which is closed with the Comm. Raises OSError.

        `rank` is this rank's number in the world, `timeout` the seconds that it waits for others.
        """
        self.transport: Transport = "shared_memory"
        self.rank = members.index(rank)
        self.world_size = num_ranks = len(members)
        self._library = library
        self._file = file
        self._members = tuple(members)
        self._timeout = timeout
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = torch.frombuffer(mmap.mmap(file, library.segment_bytes(num_ranks, CAPACITY), flags), dtype=torch.uint8)
        boards = memory[library.header_bytes(num_ranks) :].chunk(2)
        spin = SPIN_NS if num_ranks <= num_processors() else 0
        addresses = (memory.data_ptr(), boards[0].data_ptr())
        self._place = ShmMember(*addresses, CAPACITY, spin, SLICE_NS, self.rank, num_ranks, 0, 0)
        self._is_fenced = False
        # decode uses the same few views in every layer, and creating one takes longer than a small exchange
        self._view = functools.lru_cache(maxsize=64)(functools.partial(_view, boards))
        self._gather = Route(Kind.ALL_GATHER.value, 1, True, 0, num_ranks)
        self._max = self._gather._replace(kind=Kind.ALL_REDUCE_OF_MAX.value)
        self._sum = self._gather._replace(kind=Kind.ALL_REDUCE_OF_SUM.value)
        self._broadcast = Route(Kind.BROADCAST.value, 1, self.rank == 0, 0, 1)
        self._scatter = Route(Kind.ALL_TO_ALL.value, num_ranks, True, self.rank * num_ranks, num_ranks)
        if error := library.enter(file, self.rank):
            raise OSError(-error, os.strerror(-error))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor, self._gather, (self.world_size, *tensor.shape))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        if tensor.shape[0] != self.world_size:
            raise ValueError(f"a tensor of {tensor.shape[0]} parts for {self.world_size} ranks")
        return self._exchange(tensor, self._scatter, tensor.shape)

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        route = self._max if op == "max" else self._sum
        gathered = self._exchange(tensor, route, (self.world_size, *tensor.shape))
        return gathered.amax(dim=0) if op == "max" else gathered.sum(dim=0, dtype=tensor.dtype)

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self._exchange(tensor, self._broadcast, tensor.shape)

    def permute(self, tensor: Tensor, to: int, source: int) -> Tensor:
        received = self._exchange(tensor, Route(Kind.PERMUTE.value, 1, to != self.rank, source, 1), tensor.shape)
        return tensor if source == self.rank else received

    @property
    def num_exchanges(self) -> int:
        """Number of exchanges begun so far. Thread-safe."""
        return self._place.num_exchanges

    def fence(self) -> None:
        """Makes this rank raise ExchangeAborted when it waits for others, within SLICE_NS. Thread-safe."""
        self._is_fenced = True

    def close(self) -> None:
        """Leaves the segment: ranks that wait for this one raise RankLost. Tensors in the segment remain valid."""
        if self._file >= 0:
            self._library.leave(self._file, self.rank)
            os.close(self._file)
            self._file = -1

    def _exchange(self, tensor: Tensor, route: Route, shape: Sequence[int]) -> Tensor:
        """Writes and reads according to the route. Returns a view of the board, or a new tensor for a large message."""
        if not tensor.is_cpu:
            raise ValueError(f"a tensor on {tensor.device} cannot be sent through CPU memory")
        tensor = tensor.contiguous()
        part_bytes = tensor.nbytes // route.num_parts
        largest = CAPACITY // route.num_parts
        if part_bytes <= largest:
            return self._view(self._step(tensor, route, 0, part_bytes), route, part_bytes, tensor.dtype, tuple(shape))
        out = tensor.new_empty(shape)
        parts = out.view(-1).view(torch.uint8).view(route.num_read, part_bytes)
        for start in range(0, part_bytes, largest):
            length = min(largest, part_bytes - start)
            board = self._step(tensor, route, start, length)
            parts[:, start : start + length] = self._view(board, route, length, torch.uint8, (route.num_read, length))
        return out

    def _step(self, tensor: Tensor, route: Route, start: int, length: int) -> int:
        """Exchanges `length` bytes of each part, from `start` on. Returns the number of the board that holds them."""
        if self._file < 0:
            raise RuntimeError("this rank has left the group")
        num_bytes, place = tensor.nbytes, self._place
        written = route.num_parts if route.is_writing else 0
        stride = num_bytes // route.num_parts
        deed = num_bytes << KIND_BITS | route.kind
        status = self._library.exchange(place, tensor.data_ptr() + start, written, stride, length, deed)
        if status != Status.MET:
            self._finish(status, deed)
        return place.step & 1

    def _finish(self, status: int, deed: int) -> None:
        """Waits for the other ranks. Raises RankLost, CollectiveMismatch for messages that differ, or ExchangeAborted.

        A rank that fails here leaves, so that the others do not wait for it.
        """
        try:
            deadline = time.monotonic() + self._timeout
            while status == Status.WAITING:
                if self._is_fenced:
                    raise ExchangeAborted("the epoch has ended")
                lost, reason = self._suspect(time.monotonic() > deadline)
                # a lost rank may have completed this exchange before it left, so the status is checked again
                if (status := self._library.wait(self._place)) == Status.WAITING and lost >= 0:
                    raise self._worker_lost(lost, reason)
            if status == Status.UNEQUAL:
                raise self._disagreement(deed)
        except BaseException:
            self.close()
            raise

    def _suspect(self, is_late: bool) -> tuple[int, str]:
        """The first lost rank or, if `is_late`, the first one that has not arrived, and the reason; -1 for none."""
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        gone = next((rank for rank in others if self._library.is_there(self._file, rank) == 0), -1)
        if gone >= 0 or not is_late:
            return gone, "exited or left the group"
        return self._library.missing(self._place), f"did not join an exchange within {human_seconds(self._timeout)}"

    def _worker_lost(self, rank: int, reason: str) -> RankLost:
        """The error that all ranks raise. It names the rank that the first of them found missing."""
        blamed: int = self._library.find_missing(self._place, rank)
        return RankLost(self._members[blamed], reason if blamed == rank else "another rank timed out waiting for it")

    def _disagreement(self, deed: int) -> CollectiveMismatch:
        theirs = ctypes.c_int64()
        odd: int = self._library.odd(self._place, theirs)
        own, other = (f"rank {self._members[rank]} sends" for rank in (self.rank, odd))
        return CollectiveMismatch(
            f"messages differ: {own} {Kind.description(deed)}, {other} {Kind.description(theirs.value)}"
        )


def _view(
    boards: Sequence[Tensor], board: int, route: Route, length: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """A rank's view of a board whose parts have `length` bytes."""
    first = route.first * length
    return boards[board][first : first + route.num_read * length].view(dtype).view(shape)


class SegmentSetup:
    """Setup of the segment of a node: the first rank creates the segment, then all ranks enter it."""

    def __init__(self, members: Sequence[int], rank: int, epoch: int, timeout: float) -> None:
        self.path: Path | None = None
        """Path of the segment, if this rank creates it."""
        self.comm: SharedMemoryComm | None = None
        self._members = members
        self._rank = rank
        self._epoch = epoch
        self._timeout = timeout

    def make(self) -> None:
        """Compiles the library and, on the node's first rank, creates the segment and removes segments of ranks that
        were killed during setup. Raises OSError."""
        self._library = Library()
        if self._rank == self._members[0]:
            here = ProcessIdentity.here()
            sweep(here)
            self.path = FOLDER / here.name(self._epoch)
            file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                # without space, a later write would kill the process
                os.posix_fallocate(file, 0, self._library.segment_bytes(len(self._members), CAPACITY))
            finally:
                os.close(file)

    def enter(self, path: str) -> None:
        """Enters the segment at `path`. Raises OSError."""
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.comm = SharedMemoryComm(self._library, file, self._members, self._rank, self._timeout)
        except BaseException:
            os.close(file)
            raise


def share_memory(
    members: Sequence[int], rank: int, agree: Agree, *, epoch: int, timeout: float
) -> SharedMemoryComm | None:
    """The rank's handle of its node's segment; None on every rank of the world unless all of them succeed.

    `members` are the ranks of the node. The file is unlinked as soon as all have entered, so nothing remains after the
    ranks end.
    """
    entrance = SegmentSetup(members, rank, epoch, timeout)
    try:
        problem = _problem(entrance.make)
        words = agree(JoinMessage(str(entrance.path or ""), problem))
        if not any(word.problem for word in words):
            path = words[members[0]].path
            words = agree(JoinMessage(path, _problem(lambda: entrance.enter(path))))
    finally:
        if entrance.path is not None:
            entrance.path.unlink(missing_ok=True)
    problem = next((f"rank {i}: {word.problem}" for i, word in enumerate(words) if word.problem), None)
    if problem is None:
        return entrance.comm
    if entrance.comm is not None:
        entrance.comm.close()
    if rank == 0:
        log.warning("ranks on one machine use gloo instead of shared memory (slower): %s", problem)
    return None


def _problem(action: Callable[[], None]) -> str:
    """Error message of a failed action; empty if it succeeded."""
    try:
        action()
    except (OSError, ValueError) as error:  # mmap raises ValueError for a segment of another size
        return str(error)
    return ""
