"""The memory of a process, and its peak during one call, as the kernel saw them."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

PROCESS = Path("/proc/self")
RESET_PEAK = "5"
"""Written to clear_refs, it sets the peak, VmHWM, to what is resident now."""


def peak_bytes(call: Callable[[], object]) -> int | None:
    """By how much resident memory rose above where it stood; None where the kernel does not tell.

    What earlier calls freed is handed back to the system first, so that memory used again counts as well. The kernel
    keeps these numbers per thread and adds them up now and then: differences below a quarter MiB mean nothing. Bytes
    that wait in sockets are the kernel's and not counted.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (PROCESS / "clear_refs").write_text(RESET_PEAK)
    except (AttributeError, OSError):
        return None
    before = parse((PROCESS / "status").read_text(), "VmRSS")
    retained = call()
    peak = parse((PROCESS / "status").read_text(), "VmHWM")
    del retained
    return max(0, peak - before)


class Memory:
    """That of another process, in bytes. Raises OSError when it has ended."""

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")

    def reset_peak(self) -> None:
        """The peak is from now on counted from what is resident now."""
        (self._process / "clear_refs").write_text(RESET_PEAK)

    @property
    def resident(self) -> int:
        return self._field("VmRSS")

    @property
    def peak(self) -> int:
        """Most that was resident since the peak was reset."""
        return self._field("VmHWM")

    def _field(self, name: str) -> int:
        status = (self._process / "status").read_text()
        if f"{name}:" not in status:
            raise ProcessLookupError(f"{self._process.name} has ended")
        return parse(status, name)


def parse(status: str, field: str) -> int:
    """Bytes of a field of /proc/PID/status, which counts in units of 1024 bytes."""
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
