"""Binary entries of a journal, each preceded by its length and checksum.

The checksum is a CRC-32, because there is an entry per step, and it only has to find entries that a crash has torn.
"""

from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import BinaryIO
from zlib import crc32

import msgspec

from coordinator.engine_messages import Admitted, Ended, Tokens
from longleaf.types import Generate


class GenerationEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A resumable generation: everything needed to continue it, except its output."""

    request_id: str
    request: Generate
    """The request without its input."""
    question: bytes
    """Digest of the input, which identifies a repeated request."""
    prompt: bytes
    """Ids of the input, as unsigned 32-bit numbers in native byte order."""
    deadline: float | None
    """The deadline of the call plus `resume_seconds`, in seconds since the Unix epoch; None if the call had no
    deadline."""
    checkpoint: str = ""
    """The model that generates the answer."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Ids of the input."""
        return array("I", self.prompt)


JournalEvent = Admitted | Tokens | Ended
"""Stored form of the engine's events."""
Entry = GenerationEntry | JournalEvent
_HEAD = Struct("<II")
"""Length of the entry and its CRC-32."""
_KINDS: tuple[type[Entry], ...] = (GenerationEntry, Admitted, Tokens, Ended)
"""The first byte of an entry is the index of its type in this tuple, so new types must be appended."""
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]
_ENCODER = msgspec.msgpack.Encoder()


def encode_entry(entry: Entry) -> bytes:
    content = bytes((_NUMBERS[type(entry)],)) + _ENCODER.encode(entry)
    return _HEAD.pack(len(content), crc32(content)) + content


def read_entries(file: BinaryIO, num_bytes: int) -> Iterator[tuple[Entry, int]]:
    """The entries of a file of `num_bytes` with their end offsets, up to the first truncated or damaged one."""
    end = 0
    while end + _HEAD.size < num_bytes:
        size, checksum = _HEAD.unpack(file.read(_HEAD.size))
        end += _HEAD.size + size
        if not 0 < size or end > num_bytes:
            return
        content = file.read(size)
        if crc32(content) != checksum or content[0] >= len(_KINDS):
            return
        try:
            entry = _DECODERS[content[0]].decode(memoryview(content)[1:])
        except msgspec.MsgspecError:
            return  # written by another version
        yield entry, end
