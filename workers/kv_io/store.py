"""What pieces are written to and read from, as a member sees it."""

from collections.abc import Callable, Sequence
from typing import Protocol


class WrittenPiece(Protocol):
    """What became of the parts of an object."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def digest(self) -> str:
        """The blake3 of its bytes, as hexadecimal digits."""
        ...


class PieceStore(Protocol):
    """Objects by name. Both methods block, end in some time, may be called by many threads, and raise
    StorageUnavailable when the storage cannot be used."""

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> WrittenPiece:
        """Writes the parts, one after the other, as one object."""
        ...

    def get(self, name: str, digest: str | None = None) -> bytes:
        """Raises NotFound, and DataLoss if the content has another digest than the one given."""
        ...


OpenStore = Callable[[str], PieceStore]
"""Opens the storage at a URL. Raises StorageUnavailable, and InvalidArgument for no such URL."""
