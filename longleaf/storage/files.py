"""What a storage must be able to do, and how objects are named there."""

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from longleaf.errors import InvalidArgument

PART = ".part"
"""How names end of what was never put to its end: nobody reads them, and a sweep deletes them."""
MAX_NAME_BYTES = 1000
"""Of a whole name: object stores take 1024, with the folder that comes before."""
_COMPONENT = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9._%-]{0,199}")


class ObjectInfo(msgspec.Struct, frozen=True):
    """An object on storage."""

    name: str
    num_bytes: int
    modified: float
    """Seconds since the epoch, by the storage's clock; infinite where it does not tell: then nothing is old."""


class Files(Protocol):
    """Objects under names, in folders. Calls block and may hang. They raise OSError and whatever a driver raises."""

    def write(self, name: str, parts: Sequence[memoryview], is_new: bool) -> None:
        """Raises FileExistsError, and changes nothing, where `is_new` and the name is taken."""
        ...

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        ...

    def find(self, name: str) -> ObjectInfo | None: ...

    def list(self, folder: str) -> Iterable[ObjectInfo]:
        """All that lies below `folder`, which need not be there; below all where it is empty."""
        ...

    def remove(self, name: str) -> None:
        """The object need not be there."""
        ...


def is_name(name: str) -> bool:
    """Whether an object may be called so."""
    return len(name) <= MAX_NAME_BYTES and all(map(_COMPONENT.fullmatch, name.split("/")))


def check_name(name: str) -> None:
    """Raises InvalidArgument for a name that may lead out of the storage, or that some storage does not take."""
    if not is_name(name):
        raise InvalidArgument("name", f"{name[:100]!r} is not made of parts of a-z A-Z 0-9 . _ % - between slashes")
