"""Frames: headers of the records of an archive, with checksums so that nothing unverified is used.

    kind, 8 bytes | bytes of the content, 8 bytes, little endian | BLAKE3 of the content, 32 bytes
    | first half of the BLAKE3 of all before, 16 bytes

An archive starts with PREAMBLE. This layout is stable across versions, which allows distinguishing a later version from
damage.
"""

from typing import Literal, NamedTuple

from blake3 import blake3

from longleaf.errors import InvalidArgument

FIELD = "archive"
"""Name of the data in errors."""
MAGIC, VERSION = b"longleaf context", 1
VERSION_BYTES, LENGTH_BYTES, KIND_BYTES, DIGEST_BYTES, CHECK_BYTES = 8, 8, 8, 32, 16
PREAMBLE = MAGIC + VERSION.to_bytes(VERSION_BYTES, "little")
FRAME_BYTES = KIND_BYTES + LENGTH_BYTES + DIGEST_BYTES + CHECK_BYTES
Kind = Literal["head", "segment", "ids", "piece", "end"]
Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """Header of a record."""

    kind: str
    num_bytes: int
    digest: str
    """BLAKE3 of the content in hexadecimal."""

    @classmethod
    def from_content(cls, kind: Kind, content: Buffer) -> "Frame":
        return cls(kind, memoryview(content).nbytes, blake3(content).hexdigest())

    def encode(self) -> bytes:
        header = self.kind.encode().ljust(KIND_BYTES, b"\0") + self.num_bytes.to_bytes(LENGTH_BYTES, "little")
        header += bytes.fromhex(self.digest)
        return header + _check(header)

    @classmethod
    def decode(cls, data: bytes) -> "Frame":
        """Raises InvalidArgument for a damaged frame, or other data."""
        header, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
        if len(data) != FRAME_BYTES or _check(header) != check:
            raise InvalidArgument(FIELD, "the header of a record is damaged")
        kind = header[:KIND_BYTES].rstrip(b"\0").decode(errors="replace")
        length = int.from_bytes(header[KIND_BYTES:][:LENGTH_BYTES], "little")
        return cls(kind, length, header[-DIGEST_BYTES:].hex())


def check_preamble(data: bytes) -> None:
    """Raises InvalidArgument if the data is not the start of an archive, or has a later version."""
    if data[: len(MAGIC)] != MAGIC:
        raise InvalidArgument(FIELD, "this is not an exported context")
    version = int.from_bytes(data[len(MAGIC) :], "little")
    if version != VERSION:
        raise InvalidArgument(FIELD, f"it is of version {version}, and this service reads version {VERSION}")


def _check(payload: bytes) -> bytes:
    return blake3(payload).digest()[:CHECK_BYTES]
