"""The storage of pieces, as a member uses it."""

from collections.abc import Callable, Sequence
from typing import Protocol


class WrittenPiece(Protocol):
    """The result of a write."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def digest(self) -> str:
        """The blake3 digest of the bytes, in hexadecimal."""
        ...


class PieceStore(Protocol):
    """Objects by name. Both methods block for a limited time, are thread-safe, and raise StorageUnavailable when the
    storage cannot be used.
    """

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> WrittenPiece:
        """Writes the parts as one object, in order."""
        ...

    def get(self, name: str, digest: str | None = None) -> bytes:
        """Reads an object. Raises NotFound, and DataLoss if the content does not have this digest."""
        ...


OpenStore = Callable[[str], PieceStore]
"""Opens the storage at a URL. Raises StorageUnavailable, and InvalidArgument for an invalid URL."""
