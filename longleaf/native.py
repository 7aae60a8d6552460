"""C code of the package: built with the machine's compiler at its first use, loaded with ctypes."""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from longleaf.config import cache_folder

LINK = ("-shared", "-fPIC")


def load(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """The library made of one C file. Its functions run without the interpreter's lock.

    `flags` are for the compiler alone: what a library is linked with may change the whole process that loads it.
    Raises OSError, with the reason, when there is no compiler, it fails, or the result cannot be kept or loaded.
    """
    try:
        return ctypes.CDLL(str(build(source, ("-c", "-fPIC", *flags), cache_folder())))
    except RuntimeError as error:  # a user without a home has no cache folder
        raise OSError(str(error)) from error


def build(source: Path, flags: Sequence[str], folder: Path) -> Path:
    """Compiles `source` into `folder` unless that was done before, and returns the library. Raises OSError.

    The name tells source, flags and processor, since machines that share a home need not share instructions.
    """
    processor = platform.machine() + "".join(sorted(set(_processor_features())))
    key = hashlib.sha256(source.read_bytes() + " ".join((*flags, *LINK)).encode() + processor.encode()).hexdigest()[:16]
    library = folder / f"{source.stem}-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as workplace:
            compiled, linked = f"{workplace}/code.o", f"{workplace}/code.so"
            _run("cc", *flags, str(source), "-o", compiled)
            _run("cc", *LINK, compiled, "-lm", "-o", linked)
            os.replace(linked, library)
    return library


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{command[0]} failed: {error.stderr.strip()}") from error
    except subprocess.SubprocessError as error:
        raise OSError(f"{command[0]} failed: {error}") from error


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
