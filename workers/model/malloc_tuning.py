"""What the C library does with memory while weights are read."""

import ctypes
from collections.abc import Generator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's `mallopt`, see malloc.h."""
APART = 1 << 20
LARGEST = 32 << 20
"""The most to which glibc raises the limit by itself."""


@contextmanager
def large_blocks_apart() -> Generator[None]:
    """Gives what is larger than a MiB pages of its own, which go back to the system with it.

    Left alone, glibc takes blocks of a heap for what is as large as any that was freed before, and weights that stay
    between others that were only read leave holes in it: half as much again as they take was seen. Afterwards blocks up
    to the size that glibc itself would come to are taken from its heap, for steps need the same ones again and again.
    Where there is no glibc nothing happens.
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
