"""The machine, the GPU and the versions of a measurement."""

import platform
import subprocess
from datetime import UTC, datetime

import torch

from bench.gpu.ground import installed

QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"

VERSIONS = ("torch", "triton", "flash-attn", "flash-attn-4", "transformers", "longleaf")


def describe(device: str) -> dict[str, object]:
    """Name, size, clocks and versions, as they go into every result."""
    found = torch.cuda.get_device_properties(device)
    return {
        "device": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "l2_mib": round(getattr(found, "L2_cache_size", 0) / 2**20),
        "nvidia_smi": clocks(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in VERSIONS} | {"cudnn": cudnn_version()},
        "cuda": torch.version.cuda or torch.version.hip,
        "date": datetime.now(UTC).date().isoformat(),
    }


def cudnn_version() -> str | None:
    """The version of cuDNN that torch uses; None without it."""
    number = torch.backends.cudnn.version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else None


def clocks() -> dict[str, str]:
    """Driver, clocks in MHz and power limit of the first GPU as nvidia-smi tells them; empty where it is not there."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(QUERY.split(","), (part.strip() for part in output.split(",")), strict=False))
