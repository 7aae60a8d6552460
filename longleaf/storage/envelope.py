"""Envelope of stored data: type, format version, and a checksum.

    magic, 8 bytes | kind, 8 bytes | version, 4 bytes, little endian | BLAKE3 of the rest, 32 bytes | content

This layout is the same in all versions, so that data of a later version can be distinguished from damaged data.

Records of archives have another layout (longleaf.context_archive.frames), because their headers are verified before the
content has arrived.
"""

from blake3 import blake3

from longleaf.errors import DataLoss

MAGIC = b"longleaf"
KIND_BYTES, VERSION_BYTES, DIGEST_BYTES = 8, 4, 32
_HEAD_BYTES = len(MAGIC) + KIND_BYTES + VERSION_BYTES
_FULL_BYTES = _HEAD_BYTES + DIGEST_BYTES


def wrap(kind: bytes, version: int, content: bytes) -> bytes:
    head = MAGIC + kind.ljust(KIND_BYTES, b"\0") + version.to_bytes(VERSION_BYTES, "little")
    return head + _digest(head, content) + content


def unwrap(data: bytes, kind: bytes, version: int, name: str) -> bytes:
    """The content of the object `name`. Raises DataLoss if it is damaged, of another kind, or of a later version."""
    if len(data) < _FULL_BYTES:
        raise DataLoss(name, f"it is truncated to {len(data)} bytes")
    head, digest, content = data[:_HEAD_BYTES], data[_HEAD_BYTES:_FULL_BYTES], data[_FULL_BYTES:]
    if not head.startswith(MAGIC):
        raise DataLoss(name, "it has an unknown header")
    if _digest(head, content) != digest:
        raise DataLoss(name, "its checksum is wrong")
    if head[len(MAGIC) :][:KIND_BYTES] != kind.ljust(KIND_BYTES, b"\0"):
        raise DataLoss(name, f"it is not a {kind.decode()}")
    if (written := int.from_bytes(head[-VERSION_BYTES:], "little")) > version:
        raise DataLoss(name, f"it is of version {written}, and this service reads up to {version}: use a later one")
    return content


def _digest(head: bytes, content: bytes) -> bytes:
    return blake3(head).update(content).digest()
