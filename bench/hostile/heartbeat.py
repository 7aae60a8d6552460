"""A service whose event loop beats: the coordinator, its ranks, and one task more.

    python -m bench.hostile.heartbeat FOLDER CONFIG      # CONFIG: a ServiceConfig as JSON

Every few milliseconds the task writes the time to FOLDER/PID. While something keeps the loop busy it cannot, so the
longest time between two beats is how long everybody waited. Apart from it, and from ranks that each import torch by
themselves, this is `longleaf serve --launcher local`.
"""

import asyncio
import os
import signal
import sys
import time
from array import array
from collections.abc import Sequence
from functools import partial
from io import RawIOBase
from itertools import pairwise
from pathlib import Path

import msgspec

from coordinator.actor import CoordinatorActor, Reply
from coordinator.ranks.local_fleet import LocalFleet
from coordinator.settings import ServiceConfig
from longleaf.launch import ERROR, LISTENING
from workers.__main__ import main as worker_main

BEAT_SECONDS = 0.005
POLL_SECONDS = 0.02


def command(folder: Path, config: ServiceConfig) -> list[str]:
    """What starts such a service; it writes its beats into `folder`."""
    return [sys.executable, "-m", "bench.hostile.heartbeat", str(folder), msgspec.json.encode(config).decode()]


class Beats:
    """What a service wrote, on the clock that the processes of a machine share (`time.monotonic`)."""

    def __init__(self, folder: Path) -> None:
        (self._file,) = folder.iterdir()

    @property
    def pid(self) -> int:
        """The process of the service."""
        return int(self._file.name)

    def read(self) -> "array[float]":
        """Times of all beats so far, in seconds."""
        written, times = self._file.read_bytes(), array("d")
        times.frombytes(written[: len(written) // times.itemsize * times.itemsize])
        return times

    async def longest_gap(self, began: float, ended: float, timeout: float) -> float:
        """Seconds between two beats from `began` to `ended`. Waits for the next beat, `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        while (now := time.monotonic()) < deadline:
            if (times := self.read()) and times[-1] >= ended:
                return longest_gap(times, began, ended)
            await asyncio.sleep(POLL_SECONDS)  # another process is watched: nothing here could tell
        return longest_gap(self.read(), began, now)


def longest_gap(times: Sequence[float], began: float, ended: float) -> float:
    """The longest time between two of `times`, and before `ended`, of which a part lies between `began` and `ended`."""
    last = max((at for at in times if at <= began), default=began)
    inside = [at for at in times if began < at < ended]
    after = min((at for at in times if at >= ended), default=ended)
    return max(later - earlier for earlier, later in pairwise([last, *inside, after]))


async def serve(config: ServiceConfig, folder: Path) -> Reply:
    """Serves until a signal or a failure."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    actor = CoordinatorActor(config, partial(LocalFleet, worker_main))
    outcome = await actor.start()
    if outcome.error:
        return outcome
    ending, stopping = asyncio.create_task(actor.wait()), asyncio.create_task(stop.wait())
    with (folder / str(os.getpid())).open("wb", buffering=0) as file:
        beating = asyncio.create_task(_beat(file))
        print(f"{LISTENING}{config.host}:{outcome.port}", flush=True)
        await asyncio.wait([ending, stopping], return_when=asyncio.FIRST_COMPLETED)
        beating.cancel()
    if not ending.done():
        await actor.stop()
    return await ending


async def _beat(file: RawIOBase) -> None:
    while True:
        file.write(array("d", [time.monotonic()]).tobytes())
        await asyncio.sleep(BEAT_SECONDS)


def main() -> int:
    folder, config = sys.argv[1:]
    outcome = asyncio.run(serve(msgspec.json.decode(config, type=ServiceConfig), Path(folder)))
    if outcome.error:
        print(f"{ERROR}{outcome.error}", file=sys.stderr, flush=True)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
