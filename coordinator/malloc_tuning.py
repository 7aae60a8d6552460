"""Makes the process return freed memory to the system."""

import ctypes
from contextlib import suppress

LARGE_BYTES = 1 << 16
M_MMAP_THRESHOLD = -3
"""The number of this option in glibc's mallopt."""


def return_large() -> None:
    """Makes glibc allocate blocks of LARGE_BYTES or more with mmap, so that they are returned to the system when freed.

    By default glibc raises this threshold dynamically, up to 32 MiB. The token ids of documents, which grow side by
    side, would then be on its heaps and leave holes that are never returned. Other C libraries are not changed.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
