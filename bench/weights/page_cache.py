"""The part of a file that is in the page cache of Linux."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np


def drop(file: Path) -> None:
    """Removes a file from the page cache. Raises RuntimeError if more than 1 % of it remains."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if (remaining := cached_bytes(file)) > 0.01 * file.stat().st_size:
        raise RuntimeError(f"{remaining:,} bytes of {file} remain in the page cache")


def cached_bytes(file: Path) -> int:
    """Bytes of a file in the page cache, in whole pages. Raises OSError."""
    size = file.stat().st_size
    with file.open("rb+") as opened, mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int((pages & 1).sum()) * mmap.PAGESIZE
