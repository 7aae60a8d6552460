"""The memory of a process, and its peak during one call, as the kernel saw them."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

PROCESS = Path("/proc/self")
RESET_PEAK = "5"
"""Writing this to clear_refs resets the peak, VmHWM, to the current resident memory."""


def peak_bytes(call: Callable[[], object]) -> int | None:
    """The rise of resident memory above its value before the call; None where the kernel does not report it.

    Memory that earlier calls freed is returned to the system first, so that reused memory counts as well.
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
        """Resets the peak to the current resident memory."""
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
