"""A gRPC client that receives nothing: the window of its connection for the responses of a call is zero bytes."""

import asyncio
import struct
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 4
HEAD = struct.Struct(">HBBBI")
"""Of a frame: its length in 24 bits, type, flags and stream."""


class Deaf(asyncio.Protocol):
    """One connection. `call` makes calls on it whose answers never find room; pings are answered, so that it counts as
    alive."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._next = 1
        self._received = b""
        self._is_lost = asyncio.Event()

    async def __aenter__(self) -> Self:
        await asyncio.get_running_loop().create_connection(lambda: self, self._host, int(self._port))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._transport.close()
        await self._is_lost.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(PREFACE)
        self._send(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, 0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= HEAD.size:
            high, low, kind, flags, _ = HEAD.unpack_from(self._received)
            end = HEAD.size + (high << 8 | low)
            if len(self._received) < end:
                return
            payload, self._received = self._received[HEAD.size : end], self._received[end:]
            if kind in (SETTINGS, PING) and not flags & ACK:
                self._send(kind, ACK, 0, payload if kind == PING else b"")

    async def call(self, method: str, request: bytes = b"", **others: str) -> None:
        """Makes a call that never ends, with `others` among its headers. Bytes of these and of `method` that are not
        UTF-8 were decoded with surrogateescape.
        """
        stream, self._next = self._next, self._next + 2
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "deaf"}
        headers |= {"content-type": "application/grpc", "te": "trailers", **others}
        self._send(HEADERS, END_HEADERS, stream, b"".join(_literal(*pair) for pair in headers.items()))
        self._send(DATA, END_STREAM, stream, struct.pack(">BI", 0, len(request)) + request)

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._transport.write(HEAD.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload)


def _literal(name: str, value: str) -> bytes:
    """A header that is not compressed."""
    data = value.encode(errors="surrogateescape")
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(data)]) + data
