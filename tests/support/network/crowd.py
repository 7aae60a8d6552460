"""Unauthenticated peers that flood a control channel until they are killed: `python -m` this module, ADDRESS
SERVER_KEY.

Prints a line once each of them has connected.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count

import zmq

SIZE = 100
"""Number of peers, a third of each kind."""
RUBBISH = b"GET / HTTP/1.1\r\n\r\n" * 9
STAY_SECONDS = 0.02
"""How long one that ZMQ refuses stays: time for a handshake."""


class Flood:
    """Each peer reconnects as fast as it can: without a key, with an unknown key, or with invalid bytes."""

    def __init__(self, address: str, server_key: bytes) -> None:
        self._address = address
        self._server_key = server_key
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._num_come = 0

    async def hammer(self) -> None:
        kinds: tuple[Callable[[], Awaitable[None]], ...] = (self._without_key, self._with_a_key, self._with_rubbish)
        await asyncio.gather(*(self._live(kinds[index % len(kinds)]) for index in range(SIZE)))

    async def _live(self, come: Callable[[], Awaitable[None]]) -> None:
        for times in count():
            with suppress(OSError):
                await come()
            self._num_come += times == 0
            if times == 0 and self._num_come == SIZE:
                print("all have come", flush=True)

    async def _without_key(self) -> None:
        await self._knock(self._context.socket(zmq.DEALER))

    async def _with_a_key(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = self._server_key
        await self._knock(socket)

    async def _knock(self, socket: "zmq.Socket[bytes]") -> None:
        socket.connect(self._address)
        with suppress(zmq.Again):
            socket.send(RUBBISH, zmq.NOBLOCK)
        await asyncio.sleep(STAY_SECONDS)
        socket.close(linger=0)

    async def _with_rubbish(self) -> None:
        host, port = self._address.removeprefix("tcp://").rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(RUBBISH)
        writer.close()
        await writer.wait_closed()


if __name__ == "__main__":
    asyncio.run(Flood(sys.argv[1], sys.argv[2].encode()).hammer())
