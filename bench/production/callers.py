"""Many concurrent calls from a separate process."""

import asyncio
import os
import ssl
import time
from dataclasses import dataclass

from bench.production.frames import MAX_STREAM, Answers, Call, opening

CONNECTIONS = 4
MAX_OPEN = 1024
"""Calls of a connection that are not answered yet: the service keeps 256 refused ones waiting for a second each."""
PACE_SECONDS = 0.005
READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class CallLoad:
    """The parameters of a caller."""

    address: str
    tls_ca: str
    host: str
    """Address to call from: the service counts by host."""
    path: str
    credential: str
    rate: float
    """Target calls per second of all connections together."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Called:
    """The results of a caller."""

    sent: int
    ended: int
    """Calls sent that were answered; the others were cancelled at the end."""
    cpu_seconds: float
    """CPU seconds of the caller process."""


class Caller:
    """One connection of equal calls."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: Call) -> None:
        self._reader, self._writer, self._call = reader, writer, call
        self._answers = Answers()
        self._stream = 1
        self.sent = 0
        writer.write(opening())

    @property
    def ended(self) -> int:
        return self._answers.num_ended

    @property
    def room(self) -> int:
        """Calls that may be sent now."""
        is_full = self._answers.is_draining or self._stream + 2 * MAX_OPEN > MAX_STREAM
        return 0 if is_full else MAX_OPEN - (self.sent - self.ended)

    def send(self, count: int) -> None:
        streams = range(self._stream, self._stream + 2 * count, 2)
        self._writer.write(b"".join(map(self._call.encode, streams)))
        self._stream += 2 * count
        self.sent += count

    async def read(self) -> None:
        """Until the service ends the connection."""
        while data := await self._reader.read(READ_BYTES):
            if reply := self._answers.take(data):
                self._writer.write(reply)

    def close(self) -> None:
        self._writer.transport.abort()


def call(load: CallLoad) -> Called:
    """Makes calls for the configured seconds, at the target rate or as fast as answers arrive. Raises OSError when the
    port is closed."""
    return asyncio.run(_call(load))


async def _call(load: CallLoad) -> Called:
    trusting = ssl.create_default_context(cafile=load.tls_ca)
    trusting.set_alpn_protocols(["h2"])
    host, _, port = load.address.rpartition(":")
    made = Call(load.path, load.address, load.credential)
    callers = list[Caller]()
    for _ in range(CONNECTIONS):
        found = await asyncio.open_connection(host, int(port), ssl=trusting, local_addr=(load.host, 0))
        callers.append(Caller(*found, made))
    reading = [asyncio.create_task(caller.read()) for caller in callers]
    began, cpu = time.perf_counter(), _cpu()
    await _send(callers, load, began)
    cpu = _cpu() - cpu
    for task, caller in zip(reading, callers, strict=True):
        task.cancel()
        caller.close()
    await asyncio.wait(reading)
    return Called(sum(caller.sent for caller in callers), sum(caller.ended for caller in callers), cpu)


async def _send(callers: list[Caller], load: CallLoad, began: float) -> None:
    while (passed := time.perf_counter() - began) < load.seconds:
        due = int(load.rate * passed) - sum(caller.sent for caller in callers)
        for number, caller in enumerate(callers):
            share = -(-due // (len(callers) - number))
            count = max(0, min(share, caller.room))
            if count:
                caller.send(count)
            due -= count
        await asyncio.sleep(PACE_SECONDS)


def _cpu() -> float:
    times = os.times()
    return times.user + times.system
