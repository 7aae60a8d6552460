"""Bindings of shm_rendezvous.c, the shared-memory rendezvous of the ranks of one machine. Constants must match the C
file."""

import ctypes
from enum import IntEnum
from pathlib import Path

from longleaf import c_extension

SOURCE = Path(__file__).with_name("shm_rendezvous.c")
FLAGS = ("-O2", "-std=gnu11")


class Status(IntEnum):
    """Results of waiting for the other ranks; the same values as in shm_rendezvous.c."""

    WAITING = 0
    MET = 1
    UNEQUAL = 2
    """All ranks arrived, with messages of different kinds or sizes."""


KIND_BITS = 8


class Kind(IntEnum):
    """Purpose of a message. Ranks publish it with the size, so that no rank reads a message of another operation."""

    ALL_GATHER = 1
    ALL_TO_ALL = 2
    ALL_REDUCE_OF_MAX = 3
    ALL_REDUCE_OF_SUM = 4
    BROADCAST = 5
    PERMUTE = 6

    @staticmethod
    def description(deed: int) -> str:
        """The size and the kind of a message as text, for errors."""
        name = Kind(deed & (1 << KIND_BITS) - 1).name.lower()
        return f"{deed >> KIND_BITS:,} bytes to {name.replace('_of_', ' of ')}"


class ShmMember(ctypes.Structure):
    """One rank's view of the segment; the same fields as in shm_rendezvous.c."""

    _fields_ = (
        ("meeting", ctypes.c_void_p),
        ("boards", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("slice_ns", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
        ("step", ctypes.c_uint32),
        ("num_exchanges", ctypes.c_int64),
    )


class Library:
    """The functions of shm_rendezvous.c. Raises OSError if it cannot be compiled: no compiler, or not Linux."""

    def __init__(self) -> None:
        library = c_extension.load(SOURCE, FLAGS)
        place, number, size = ctypes.POINTER(ShmMember), ctypes.c_int, ctypes.c_int64
        self._header_bytes = library.longleaf_meet_header_bytes
        self._header_bytes.argtypes, self._header_bytes.restype = [size], size
        self.exchange = library.longleaf_meet_exchange
        self.exchange.argtypes = [place, ctypes.c_void_p, size, size, size, size]
        self.wait = library.longleaf_meet_wait
        self.missing = library.longleaf_meet_missing
        self.wait.argtypes = self.missing.argtypes = [place]
        self.odd = library.longleaf_meet_odd
        self.odd.argtypes = [place, ctypes.POINTER(size)]
        self.find_missing = library.longleaf_meet_blame
        self.find_missing.argtypes = [place, number]
        self.enter = library.longleaf_meet_enter
        self.leave = library.longleaf_meet_leave
        self.is_there = library.longleaf_meet_is_there
        self.enter.argtypes = self.leave.argtypes = self.is_there.argtypes = [number, size]

    def header_bytes(self, num_ranks: int) -> int:
        """Bytes before the boards."""
        return self._header_bytes(num_ranks)

    def segment_bytes(self, num_ranks: int, capacity: int) -> int:
        """Size of the header and the two boards. Each rank has `capacity` bytes on each board."""
        return self.header_bytes(num_ranks) + 2 * num_ranks * capacity
