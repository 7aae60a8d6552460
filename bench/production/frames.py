"""gRPC calls of a client that costs next to nothing: prepared bytes, and answers that are only counted.

A client library computes as much for a call as the service does, and the clients of a measurement share the service's
machine. This implements the part of HTTP/2 that a burst of equal calls needs: uncompressed headers, no message larger
than a frame, and flow-control windows for all answers from the start.
"""

import struct
from collections.abc import Iterator

DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0x0, 0x1, 0x4, 0x6, 0x7, 0x8
ACK, END_STREAM, END_HEADERS = 0x1, 0x1, 0x4
HEAD_BYTES = 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LARGEST_WINDOW, USUAL_WINDOW = (1 << 31) - 1, (1 << 16) - 1
MAX_STREAM = (1 << 31) - 1
EMPTY_MESSAGE = bytes(5)
"""Of gRPC: not compressed, 0 bytes."""

# Places in HPACK's static table; those of `_literal` are followed by a value that no table is to keep.
_POST, _HTTPS = b"\x83", b"\x87"
_AUTHORITY, _PATH, _CONTENT_TYPE, _AUTHORIZATION, _NEW = b"\x01", b"\x04", b"\x0f\x10", b"\x0f\x08", b"\x00"
_MAX_STRING = 126
"""Bytes whose number takes one byte."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def opening() -> bytes:
    """How a connection begins: with room for all answers that could come."""
    more = struct.pack(">I", LARGEST_WINDOW - USUAL_WINDOW)
    return PREFACE + frame(SETTINGS, 0, 0) + frame(WINDOW_UPDATE, 0, 0, more)


class Call:
    """A call with an empty message, over TLS; the same bytes each time, but for the number of its stream."""

    def __init__(self, path: str, authority: str, credential: str) -> None:
        """Without a credential for ""."""
        block = _POST + _HTTPS + _literal(_PATH, path) + _literal(_AUTHORITY, authority)
        block += _literal(_CONTENT_TYPE, "application/grpc") + _literal(_NEW + _string("te"), "trailers")
        if credential:
            block += _literal(_AUTHORIZATION, f"Bearer {credential}")
        self._head = frame(HEADERS, END_HEADERS, 0, block)[:5]
        self._block = block
        self._data_head = frame(DATA, END_STREAM, 0, EMPTY_MESSAGE)[:5]

    def encode(self, stream: int) -> bytes:
        """As it is sent in that stream."""
        number = struct.pack(">I", stream)
        return self._head + number + self._block + self._data_head + number + EMPTY_MESSAGE


class Answers:
    """Frames received on a connection."""

    def __init__(self) -> None:
        self._buffer = b""
        self.num_ended = 0
        """Calls that were answered to their end."""
        self.is_draining = False
        """Whether the service wants no more calls on this connection."""

    def take(self, data: bytes) -> bytes:
        """Counts the frames in `data`; returns the bytes to send in reply."""
        replies = list[bytes]()
        for kind, flags, payload in self._frames(data):
            if kind in (HEADERS, DATA):
                self.num_ended += bool(flags & END_STREAM)
            elif kind == GOAWAY:
                self.is_draining = True
            elif kind in (PING, SETTINGS) and not flags & ACK:
                replies.append(frame(kind, ACK, 0, payload if kind == PING else b""))
        return b"".join(replies)

    def _frames(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Kind, flags and payload of those that are whole."""
        buffer, at = self._buffer + data, 0
        while len(buffer) - at >= HEAD_BYTES:
            end = at + HEAD_BYTES + int.from_bytes(buffer[at : at + 3])
            if end > len(buffer):
                break
            yield buffer[at + 3], buffer[at + 4], buffer[at + HEAD_BYTES : end]
            at = end
        self._buffer = buffer[at:]


def _literal(name: bytes, value: str) -> bytes:
    return name + _string(value)


def _string(value: str) -> bytes:
    data = value.encode()
    if len(data) > _MAX_STRING:
        raise ValueError(f"{len(data)} bytes are more than {_MAX_STRING}")
    return bytes([len(data)]) + data
