"""A service whose event loop has a heartbeat task beside the coordinator and its ranks.

    python -m bench.hostile.heartbeat FOLDER CONFIG      # CONFIG: a ServiceConfig as JSON

Every few milliseconds the task writes the time and the number of callbacks of the loop to FOLDER/PID. A busy loop
delays the task, so the longest time between two beats is the longest delay of any client. For each callback that
computed for a millisecond or more, FOLDER/PID.callbacks has the time and the CPU seconds of the thread; other processes
do not affect them. Otherwise this equals `longleaf serve --launcher local`, except that each rank imports torch
separately.
"""

import asyncio
import os
import signal
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from io import RawIOBase
from itertools import pairwise
from pathlib import Path

import msgspec

from coordinator.actor import CoordinatorActor, StartResult
from coordinator.cluster.local_fleet import LocalFleet
from longleaf.launch import ERROR, LISTENING
from longleaf.service_settings import ServiceConfig
from workers.__main__ import main as worker_main

BEAT_SECONDS = 0.005
POLL_SECONDS = 0.02
LONG_SECONDS = 0.001
"""Callbacks that compute for less are only counted."""
HTTP = "http"
"""A file with the address of the gateway, if there is one."""
CALLBACKS = ".callbacks"
"""Suffix of the file of long callbacks."""


def command(folder: Path, config: ServiceConfig) -> list[str]:
    """The command that starts such a service; it writes its beats into `folder`."""
    return [sys.executable, "-m", "bench.hostile.heartbeat", str(folder), msgspec.json.encode(config).decode()]


class Beats:
    """The records of a service, on the clock that the processes of a machine share (`time.monotonic`)."""

    def __init__(self, folder: Path) -> None:
        (self._file,) = (file for file in folder.iterdir() if file.name.isdecimal())
        self.http = (folder / HTTP).read_text()
        """Address of the gateway; empty where there is none."""

    @property
    def pid(self) -> int:
        """The process of the service."""
        return int(self._file.name)

    def read(self) -> "array[float]":
        """Times of all beats so far, in seconds."""
        return _pairs(self._file)[::2]

    def callbacks(self, began: float, ended: float) -> tuple[int, list[float]]:
        """How many callbacks were called between two times, and how many seconds those of LONG_SECONDS or more
        computed, rising."""
        beats, long = _pairs(self._file), _pairs(self._file.with_name(self._file.name + CALLBACKS))
        counts = [count for at, count in zip(beats[::2], beats[1::2], strict=True) if began <= at <= ended]
        found = [seconds for at, seconds in zip(long[::2], long[1::2], strict=True) if began <= at <= ended]
        return int(counts[-1] - counts[0]) if counts else 0, sorted(found)

    async def longest_gap(self, began: float, ended: float, timeout: float) -> float:
        """Seconds between two beats from `began` to `ended`. Waits for the next beat, `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        while (now := time.monotonic()) < deadline:
            if (times := self.read()) and times[-1] >= ended:
                return longest_gap(times, began, ended)
            await asyncio.sleep(POLL_SECONDS)  # another process is watched, and sends no notification
        return longest_gap(self.read(), began, now)


def quantile(count: int, highest: Sequence[float], part: float) -> float:
    """The value that `part` of so many at most have, of which the highest are given, in order; 0 for one that is not
    among these."""
    num_above = int(count * (1 - part))
    return highest[-1 - num_above] if num_above < len(highest) else 0.0


def _pairs(file: Path) -> "array[float]":
    """The records of a file: complete pairs only."""
    written, found = file.read_bytes(), array("d")
    pair = 2 * found.itemsize
    found.frombytes(written[: len(written) // pair * pair])
    return found


def longest_gap(times: Sequence[float], began: float, ended: float) -> float:
    """The longest time between two of `times`, and before `ended`, of which a part lies between `began` and `ended`."""
    last = max((at for at in times if at <= began), default=began)
    inside = [at for at in times if began < at < ended]
    after = min((at for at in times if at >= ended), default=ended)
    return max(later - previous for previous, later in pairwise([last, *inside, after]))


async def serve(config: ServiceConfig, folder: Path) -> StartResult:
    """Serves until a signal or a failure."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    actor = CoordinatorActor(config, partial(LocalFleet, worker_main))
    outcome = await actor.start()
    if outcome.error:
        return outcome
    ending, stopping = asyncio.create_task(actor.wait()), asyncio.create_task(stop.wait())
    beats = folder / str(os.getpid())
    (folder / HTTP).write_text(outcome.http)
    with (
        beats.with_name(beats.name + CALLBACKS).open("wb", buffering=0) as long,
        beats.open("wb", buffering=0) as file,
    ):
        beating = asyncio.create_task(_beat(file, Callbacks(long)))
        print(f"{LISTENING}{config.host}:{outcome.port}", flush=True)
        await asyncio.wait([ending, stopping], return_when=asyncio.FIRST_COMPLETED)
        beating.cancel()
    if not ending.done():
        await actor.stop()
    return await ending


class Callbacks:
    """Counts the callbacks of this process's event loops from now on, and records the long ones."""

    def __init__(self, file: RawIOBase) -> None:
        self.count = 0
        self._file = file
        self._call: Callable[[asyncio.Handle], None] = asyncio.Handle._run
        # every loop calls this method of every callback
        asyncio.Handle._run = _timed(self)  # pyright: ignore[reportAttributeAccessIssue]

    def call(self, handle: asyncio.Handle) -> None:
        began = time.thread_time()
        self._call(handle)
        self.count += 1
        if (seconds := time.thread_time() - began) >= LONG_SECONDS:
            self._file.write(array("d", [time.monotonic(), seconds]).tobytes())


def _timed(callbacks: Callbacks) -> Callable[[asyncio.Handle], None]:
    def run(self: asyncio.Handle) -> None:
        callbacks.call(self)

    return run


async def _beat(file: RawIOBase, callbacks: Callbacks) -> None:
    while True:
        file.write(array("d", [time.monotonic(), callbacks.count]).tobytes())
        await asyncio.sleep(BEAT_SECONDS)


def main() -> int:
    folder, config = sys.argv[1:]
    outcome = asyncio.run(serve(msgspec.json.decode(config, type=ServiceConfig), Path(folder)))
    if outcome.error:
        print(f"{ERROR}{outcome.error}", file=sys.stderr, flush=True)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
