"""Size-limited reading of whole files."""

import os
import stat
from pathlib import Path

from longleaf.errors import InvalidArgument

MAX_BYTES = 16 << 20
"""Maximum size of a settings file."""


def read_small(field: str, path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Contents of a regular file of at most `max_bytes`; pipes are refused because opening them may block. Raises
    InvalidArgument naming `field`."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(max_bytes + 1) if is_regular else b""
    except OSError as error:
        raise InvalidArgument(field, f"{path}: {error.strerror}") from None
    if not is_regular:
        raise InvalidArgument(field, f"{path} is not a regular file")
    if len(data) > max_bytes:
        raise InvalidArgument(field, f"{path} has more than {max_bytes:,} bytes")
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
