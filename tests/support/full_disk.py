"""Temporary files on a full disk."""

from typing import BinaryIO, cast


def full_file(*_: object, buffering: int = -1, **__: object) -> BinaryIO:
    """Stands for `tempfile.TemporaryFile`: no byte can be written."""
    return cast(BinaryIO, open("/dev/full", "r+b", buffering=buffering))
