"""Settings of the C library's allocator while weights are read."""

import ctypes
from collections.abc import Generator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`, see malloc.h."""
APART = 1 << 20
LARGEST = 32 << 20
"""The maximum to which glibc raises its dynamic threshold."""


@contextmanager
def large_blocks_apart() -> Generator[None]:
    """Allocates blocks larger than 1 MiB with mmap in the body, so that freeing them returns the memory to the system.

    By default, glibc raises the mmap threshold to the size of the largest freed block. Weights then share the heap with
    temporary blocks of the same size, and fragment it: an overhead of 50% was observed. After the body, blocks up to
    glibc's own maximum come from the heap, because steps allocate the same sizes repeatedly. Without glibc this does
    nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(MMAP_THRESHOLD, APART)
    try:
        yield
    finally:
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, 2 * LARGEST)
