"""Interface of storage backends, and rules for object names."""

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from longleaf.errors import InvalidArgument

PART = ".part"
"""Suffix of incomplete objects, which are not read and are deleted by a sweep."""
MAX_NAME_BYTES = 1000
"""Limit of a whole name: object stores allow 1024, including the folder prefix."""
_COMPONENT = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9._%-]{0,199}")


class ObjectInfo(msgspec.Struct, frozen=True):
    """An object on storage."""

    name: str
    num_bytes: int
    modified: float
    """Seconds since the Unix epoch, by the storage's clock; infinite if unknown, so that the object is never considered
    old."""


class Files(Protocol):
    """Named objects in folders. Calls block and may hang. They raise OSError and any exception of a driver."""

    def write(self, name: str, parts: Sequence[memoryview], is_new: bool) -> None:
        """Raises FileExistsError, without changes, if `is_new` and the name is taken."""
        ...

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        ...

    def find(self, name: str) -> ObjectInfo | None: ...

    def list(self, folder: str) -> Iterable[ObjectInfo]:
        """All objects below `folder`, which need not exist; all objects if it is empty."""
        ...

    def remove(self, name: str) -> None:
        """Does nothing if the object does not exist."""
        ...


def is_name(name: str) -> bool:
    """Whether it is a valid object name."""
    return len(name) <= MAX_NAME_BYTES and all(map(_COMPONENT.fullmatch, name.split("/")))


def check_name(name: str) -> None:
    """Raises InvalidArgument for a name that could escape the storage, or that some storage does not support."""
    if not is_name(name):
        raise InvalidArgument("name", f"{name[:100]!r} must consist of parts of a-z A-Z 0-9 . _ % - between slashes")
