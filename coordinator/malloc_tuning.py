"""How the process returns memory that it has freed."""

import ctypes
from contextlib import suppress

LARGE_BYTES = 1 << 16
M_MMAP_THRESHOLD = -3
"""The number that glibc gives to this setting."""


def return_large() -> None:
    """Has glibc take memory for what is LARGE_BYTES or more from the system, and return it as soon as it is freed.

    By itself it raises that size with what is freed, to as much as 32 MiB; then the ids of documents, which grow side
    by side, lie in its heaps, and leave holes there that are never given back. Other C libraries are left as they are.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
