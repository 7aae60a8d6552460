"""Conversion of GGUF files to checkpoints in safetensors, by a process with transformers (workers.gguf_convert)."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec

from longleaf.checkpoints.cache import empty_partial, locked, models_cache
from longleaf.checkpoints.conversion_report import ConversionReport
from longleaf.checkpoints.gguf_header import GgufHeader, read_header
from longleaf.checkpoints.interaction import Interaction
from longleaf.errors import InvalidArgument, ModelRefused, StartError, Unavailable
from longleaf.extras import require_extra
from longleaf.formatting import human_bytes, printable
from longleaf.model_report import Dequantized
from longleaf.resources import memory

NOTE = "gguf.json"
"""File of a converted checkpoint that describes its GGUF file."""
MEMORY_FACTOR = 2
"""Memory of a conversion, divided by the size of its result: the weights as they are read, and the model's. For
SmolLM2-135M in float32, 1.7 were measured."""
BASE_BYTES = 1 << 30
"""Memory of a process with torch and transformers."""
SPARE_BYTES = 4 << 30
"""Memory that the process may allocate beyond the estimate, such as stacks of threads."""
WeightDtype = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: dict[WeightDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def convert(file: Path, folder: Path, dtype: WeightDtype, interaction: Interaction) -> None:
    """Writes the checkpoint `folder`, which must not exist, from a GGUF file.

    Raises ModelRefused if the file cannot be used, StartError if memory or disk do not suffice, and InvalidArgument if
    the folder exists.
    """
    require_extra("gguf", "a GGUF file")
    if folder.exists():
        raise InvalidArgument("DIR", f"{folder} exists: name a new folder")
    _convert(file, read_header(file), folder, dtype, interaction)


def convert_to_cache(file: Path, interaction: Interaction) -> Path:
    """The folder of the converted file in the cache; converts the file if it is not there, in float32."""
    require_extra("gguf", "a GGUF file")
    header = read_header(file)
    folder = models_cache() / f"gguf-{header.digest[:16]}" / file.stem
    with locked(folder):
        if folder.is_dir():
            interaction.notify(f"using the converted copy of {file.name} in {folder}")
        else:
            _convert(file, header, folder, "float32", interaction)
    return folder


def read_note(folder: Path) -> Dequantized | None:
    """The GGUF file from which a checkpoint was converted, if it was."""
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=Dequantized)
    except (OSError, msgspec.MsgspecError):
        return None


def _convert(file: Path, header: GgufHeader, folder: Path, dtype: WeightDtype, interaction: Interaction) -> None:
    result_bytes = header.num_elements * ITEM_BYTES[dtype]
    _check_room(file, folder.parent, result_bytes)
    kinds = ", ".join(header.kinds)
    interaction.notify(
        f"converting {file.name} ({kinds}; {human_bytes(file.stat().st_size)}) to safetensors in {dtype} "
        f"({human_bytes(result_bytes)}), once, in {folder}"
    )
    partial = empty_partial(folder)
    try:
        max_bytes = MEMORY_FACTOR * result_bytes + BASE_BYTES + SPARE_BYTES
        report = _run([str(file.absolute()), str(partial.absolute()), dtype, str(max_bytes)], interaction)
        if report.is_full:
            raise StartError(f"{folder.parent} has no space left for {human_bytes(result_bytes)} of weights")
        if report.reason:
            raise ModelRefused(f"{file} cannot be converted: {printable(report.reason)}")  # it quotes the file
        (partial / NOTE).write_bytes(msgspec.json.encode(Dequantized(file.name, header.kinds, dtype)))
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_room(file: Path, folder: Path, result_bytes: int) -> None:
    """Raises StartError if memory or disk do not suffice for a result of this size."""
    needed, free = MEMORY_FACTOR * result_bytes + BASE_BYTES, memory().free
    if needed > free:
        raise StartError(
            f"converting {file.name} needs {human_bytes(needed)} of memory, and {human_bytes(free)} are free: convert "
            "it on a larger machine with `longleaf models convert`, and copy the folder"
        )
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    if (free := shutil.disk_usage(existing).free) < result_bytes:
        raise StartError(f"{folder} has {human_bytes(free)} free, and the weights need {human_bytes(result_bytes)}")


def _run(arguments: list[str], interaction: Interaction) -> ConversionReport:
    """Runs the conversion in a process. Raises Unavailable if that ends without a report."""
    # -P: a folder named `tokenizers` where the command was typed must not shadow the library.
    command = [sys.executable, "-P", "-m", "workers.gguf_convert", *arguments]
    errors = None if interaction.has_progress_bars else subprocess.PIPE
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, check=False)
    try:
        return msgspec.json.decode(b"".join(done.stdout.strip().splitlines()[-1:]), type=ConversionReport)
    except msgspec.DecodeError:
        last = b"".join((done.stderr or b"").strip().splitlines()[-1:]).decode(errors="replace")
        cause = f"exit code {done.returncode}" + (f": {last}" if last else "")
        raise Unavailable(f"the conversion ended with {cause}") from None
