"""Quantization of a checkpoint to 8 or 4 bits, by a process with torch (workers.quantize_checkpoint)."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec

from longleaf.checkpoints.cache import empty_partial
from longleaf.errors import InvalidArgument, ModelRefused, StartError, Unavailable
from longleaf.formatting import human_bytes, printable

QuantizedKind = Literal["fp8-block", "int4"]


class LayerError(msgspec.Struct, frozen=True):
    """The error of a weight by its rounding."""

    name: str
    shape: tuple[int, ...]
    relative_error: float
    """Root of the sum of squared errors by that of squared weights."""
    largest_error: float
    """Largest error by the largest weight."""


class QuantizationReport(msgspec.Struct, frozen=True):
    """The result of quantizing a checkpoint."""

    reason: str = ""
    """Reason why it was not quantized; empty if it was."""
    kind: str = ""
    """The layout, such as `int4 in groups of 128`."""
    layers: tuple[LayerError, ...] = ()
    unchanged: tuple[str, ...] = ()
    """Matrices that keep their type."""
    num_bytes: int = 0
    """Bytes of all tensors that were written."""
    num_source_bytes: int = 0


def quantize(source: Path, folder: Path, kind: QuantizedKind) -> QuantizationReport:
    """Writes the checkpoint `folder`, which must not exist, from the one in `source`.

    Raises ModelRefused if the source cannot be quantized, StartError if the disk has no room, InvalidArgument if the
    folder exists, and Unavailable if the process ends early.
    """
    if folder.exists():
        raise InvalidArgument("DIR", f"{folder} exists: name a new folder")
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    existing = next(parent for parent in folder.absolute().parents if parent.is_dir())
    if (free := shutil.disk_usage(existing).free) < size:  # more than enough: the result is smaller
        raise StartError(f"{folder} has {human_bytes(free)} free, and the source has {human_bytes(size)}")
    partial = empty_partial(folder)
    try:
        report = _run([str(source.absolute()), str(partial.absolute()), kind])
        if report.reason:
            raise ModelRefused(f"{source} cannot be quantized: {printable(report.reason)}")
        partial.rename(folder)
        return report
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run(arguments: list[str]) -> QuantizationReport:
    # -P: a folder named `tokenizers` where the command was typed must not shadow the library.
    command = [sys.executable, "-P", "-m", "workers.quantize_checkpoint", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        return msgspec.json.decode(b"".join(done.stdout.strip().splitlines()[-1:]), type=QuantizationReport)
    except msgspec.DecodeError:
        last = b"".join(done.stderr.strip().splitlines()[-1:]).decode(errors="replace")
        cause = f"exit code {done.returncode}" + (f": {last}" if last else "")
        raise Unavailable(f"the quantization ended with {cause}") from None
