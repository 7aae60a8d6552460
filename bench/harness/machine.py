"""The machine of a measurement."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

PACKAGES = ("torch", "transformers", "ray", "grpcio", "numpy")


def describe() -> dict[str, object]:
    """Processor, memory, load and versions, as they go into every result."""
    return {
        "cpu": cpu_model(),
        "logical_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "date": datetime.now(UTC).date().isoformat(),
    }


def cpu_model() -> str:
    """Name of the processor from Linux, otherwise from Python."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
