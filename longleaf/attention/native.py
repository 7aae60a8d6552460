"""The compiled decode kernel of CPU ranks: built from decode.c with the machine's C compiler, loaded with ctypes."""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from longleaf.config import cache_folder

SOURCE = Path(__file__).with_name("decode.c")
# fast-math vectorises dot products and exponentials. It is for the compiler alone: a library that is also *linked* with
# it flushes denormals to zero in the whole process that loads it.
COMPILE = ("-c", "-O3", "-march=native", "-ffast-math", "-fPIC")
LINK = ("-shared", "-fPIC")
MAX_ROWS = 8
"""From here on torch's matrix products are as fast."""

log = logging.getLogger(__name__)


class NativeDecode:
    """Full reads of at most MAX_ROWS query rows per key head, in float32."""

    def __init__(self, library: Path) -> None:
        self._run = ctypes.CDLL(str(library)).longleaf_decode
        self._run.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 5 + [ctypes.c_float] * 2
        self._run.restype = None

    @staticmethod
    def load() -> "NativeDecode | None":
        """The kernel, compiled at the first call on this kind of processor; None where there is no C compiler."""
        try:
            return NativeDecode(build(cache_folder()))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            log.warning("no compiled decode kernel, torch's own is used instead (slower): %s", error)
            return None

    def can_run(self, q_KTGD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> bool:
        """Whether rows are few, numbers float32, and the heads, keys and values lie as the kernel expects."""
        rows, dim = q_KTGD.shape[1] * q_KTGD.shape[2], k_KSD.shape[2]
        is_in_place = k_KSD.stride()[1:] == (dim, 1) and k_KSD.stride() == v_KSD.stride()
        return rows <= MAX_ROWS and k_KSD.dtype == torch.float32 and is_in_place

    def __call__(
        self, q_KTGD: Tensor, k_KSD: Tensor, v_KSD: Tensor, scale: float, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """out [K, T, G, D] and natural-log lse [K, T, G], like the queries; S >= 1."""
        heads, num_rows, group, dim = q_KTGD.shape
        q_KTGD = q_KTGD.contiguous()
        out = torch.empty_like(q_KTGD)
        lse = q_KTGD.new_empty(heads, num_rows, group)
        tensors = (q_KTGD, k_KSD, v_KSD, out, lse)
        sizes = (heads, num_rows * group, dim, k_KSD.shape[1], k_KSD.stride(0))
        self._run(*(tensor.data_ptr() for tensor in tensors), *sizes, scale, softcap or 0.0)
        return out, lse


def build(folder: Path) -> Path:
    """Compiles decode.c into `folder` unless that was done before, and returns the library.

    The name tells source, flags and processor, since machines that share a home need not share instructions.
    Raises OSError or SubprocessError when there is no compiler or it fails.
    """
    processor = platform.machine() + "".join(sorted(set(_processor_features())))
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(COMPILE + LINK).encode() + processor.encode()).hexdigest()[:16]
    library = folder / f"decode-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as workplace:
            compiled, linked = f"{workplace}/decode.o", f"{workplace}/decode.so"
            _run("cc", *COMPILE, str(SOURCE), "-o", compiled)
            _run("cc", *LINK, compiled, "-lm", "-o", linked)
            os.replace(linked, library)
    return library


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _processor_features() -> list[str]:
    """Names of the processor's instruction sets, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith(("flags", "Features")):
            return line.split(":", 1)[1].split()
    return []
