"""A gRPC client that receives nothing: the window of its connection for the responses of a call is zero bytes."""

import asyncio
import struct
from contextlib import suppress
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 4
HEAD = struct.Struct(">HBBBI")
"""Of a frame: its length in 24 bits, type, flags and stream."""


class Deaf:
    """One connection. `call` makes calls on it whose answers never find room; pings are answered, so that it counts as
    alive."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._next = 1

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        self._writer.write(PREFACE)
        self._send(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, 0))
        self._answering = asyncio.create_task(self._answer())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._answering.cancel()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def call(self, method: str, request: bytes = b"", **others: str) -> None:
        """Makes a call that never ends, with `others` among its headers. Bytes of these and of `method` that are not
        UTF-8 were decoded with surrogateescape.
        """
        stream, self._next = self._next, self._next + 2
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "deaf"}
        headers |= {"content-type": "application/grpc", "te": "trailers", **others}
        self._send(HEADERS, END_HEADERS, stream, b"".join(_literal(*pair) for pair in headers.items()))
        self._send(DATA, END_STREAM, stream, struct.pack(">BI", 0, len(request)) + request)
        await self._writer.drain()

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._writer.write(HEAD.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload)

    async def _answer(self) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                high, low, kind, flags, _ = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                payload = await self._reader.readexactly(high << 8 | low)
                if kind in (SETTINGS, PING) and not flags & ACK:
                    self._send(kind, ACK, 0, payload if kind == PING else b"")


def _literal(name: str, value: str) -> bytes:
    """A header that is not compressed."""
    data = value.encode(errors="surrogateescape")
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(data)]) + data
