"""CPU time of other work on this machine during a measurement."""

import time
from contextlib import suppress

import psutil


class Others:
    """Processes that neither are this one nor were started by it, from here on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._before = _seconds_of_others()

    @property
    def cores(self) -> float:
        """How many processors they took in the mean."""
        return max(0.0, (_seconds_of_others() - self._before) / (time.perf_counter() - self._began))


def own_seconds() -> float:
    """CPU seconds of this process and its descendants."""
    this = psutil.Process()
    return sum(_seconds(process) for process in (this, *this.children(recursive=True)))


def _seconds_of_others() -> float:
    everybody = psutil.cpu_times()
    return everybody.user + everybody.system + getattr(everybody, "nice", 0.0) - own_seconds()


def _seconds(process: psutil.Process) -> float:
    """With those of its children that have ended."""
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return times.user + times.system + times.children_user + times.children_system
    return 0.0
