"""Fingerprints of model folders, which show whether two folders hold the same model without reading all of it.

The fingerprint covers the complete TEXTS and, for every tensor of the weights, its name, dtype and shape, and
PIECE_BYTES at the start, in the middle and at the end (or all of a small tensor). The distribution of tensors over
files does not matter.

Changes elsewhere inside a tensor are not detected, such as flipped bits or some rows of a table. Folders with equal
fingerprints hold copies of one model, which may have been damaged since. The fingerprint is not a signature: an
attacker can change the parts that are not read. Other files, and the metadata of the weights, are ignored.

A fingerprint takes at most three reads per tensor, and memory for one file header on each of READERS threads.
"""

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from longleaf.errors import ModelRefused

if TYPE_CHECKING:
    from blake3 import blake3

CONFIG = "config.json"
TEXTS = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE_BYTES = 4096
CHUNK_BYTES = 1 << 20
LENGTH_BYTES, MAX_HEADER_BYTES = 8, 100_000_000
"""Size of the header's length field in a safetensors file, and the header limit of safetensors itself."""
READERS = 16
"""Number of weight files that are read concurrently. Shared storage has high latency, but serves reads in parallel."""
FILE_DIGITS = 16
MAX_NAME_BYTES = 64 << 10
"""Maximum total bytes of the names of weight files that are listed individually. They are sent in one message."""


class Fingerprint(msgspec.Struct, frozen=True):
    """Two fingerprints are equal if `digest` is. Digests are hexadecimal BLAKE3."""

    digest: str
    files: dict[str, str]
    """Digest of each file, to show which file differs. The same model may be distributed over other files."""


class _TensorLocation(msgspec.Struct, frozen=True):
    """Location of a tensor in a safetensors file. In the header, offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _Config(msgspec.Struct, frozen=True):
    transformers_weights: str | None = None


def read_fingerprint(folder: Path) -> Fingerprint:
    """The fingerprint of the model in `folder`. The weights may be missing.

    Raises ModelRefused, which names the file, if the folder or the config is missing, or a file cannot be read.
    """
    files = read_texts(folder)
    names = weight_files(folder)
    with ThreadPoolExecutor(READERS) as executor:
        found = dict(zip(names, executor.map(_read_weights, [folder / name for name in names]), strict=True))
    # Of several tensors with the same name, the last one is used, so the order of the files must be kept.
    tensors = sorted((tensor for each in found.values() for tensor in each), key=itemgetter(0))
    if sum(len(os.fsencode(name)) for name in names) > MAX_NAME_BYTES:
        found = {INDEX: tensors}
    texts = sorted(files.items())
    whole = _hasher(msgspec.msgpack.encode(("longleaf", 1, texts)))
    for _, digest in tensors:
        whole.update(digest)
    files |= {name: _shortened(b"".join(digest for _, digest in sorted(each))) for name, each in found.items()}
    return Fingerprint(whole.hexdigest(), files)


def file_states(folder: Path) -> dict[str, tuple[int, int]]:
    """The size in bytes and the time of the last change in ns of the config and the weight files. If they remain equal,
    so does the model, unless someone resets the time. Raises ModelRefused.
    """
    _check_folder(folder)
    found = dict[str, tuple[int, int]]()
    for path in [folder / name for name in (CONFIG, *weight_files(folder))]:
        with _reading(path):
            status = path.stat()
        found[path.name] = status.st_size, status.st_mtime_ns
    return found


def read_texts(folder: Path) -> dict[str, str]:
    """The digests of the existing TEXTS, which the coordinator reads. Raises ModelRefused."""
    _check_folder(folder)
    return {name: _read_whole(folder / name) for name in TEXTS if (folder / name).is_file()}


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelRefused(f"model folder {folder} does not exist")
    if not (folder / CONFIG).is_file():
        raise ModelRefused(f"{folder} is not a checkpoint: it has no {CONFIG}")


def _hasher(content: bytes = b"") -> "blake3":
    from blake3 import blake3  # clients import this module for Fingerprint, and do not have it

    return blake3(content)


def _shortened(content: bytes) -> str:
    return _hasher(content).hexdigest()[:FILE_DIGITS]


@contextmanager
def _reading(path: Path) -> Generator[None, None, None]:
    """Converts errors of reading a file to ModelRefused."""
    try:
        yield
    except (OSError, ValueError, ArithmeticError, RecursionError, msgspec.MsgspecError) as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error


def _read_whole(path: Path) -> str:
    """The digest of a file of any length."""
    digest = _hasher()
    with _reading(path), path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:FILE_DIGITS]


def weight_files(folder: Path) -> Sequence[str]:
    """Names of the weight files that transformers would load, in its order; empty if there are none in safetensors
    format. Raises ModelRefused."""
    with _reading(folder / CONFIG):
        weights = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config).transformers_weights
    first = weights or next((name for name in (SINGLE, INDEX) if (folder / name).is_file()), None)
    if first is None or not first.endswith(".index.json"):
        return [first] if first is not None and first.endswith(".safetensors") else []
    with _reading(folder / first):
        named = msgspec.json.decode((folder / first).read_bytes(), type=_Index).weight_map
    return sorted({name for name in named.values() if name.endswith(".safetensors")})


def count_numbers(folder: Path, part: str = "") -> dict[str, int]:
    """The numbers in the weights of the model in `folder`, by the name of their type in safetensors files; empty if
    there are none in this format. Only tensors whose names contain `part` count. Raises ModelRefused, which names the
    file.
    """
    found = dict[str, int]()
    for name in weight_files(folder):
        with _opened(folder / name) as (_, places):
            for place in (place for tensor, place in places.items() if part in tensor):
                found[place.dtype] = found.get(place.dtype, 0) + prod(place.shape)
    return found


@contextmanager
def _opened(path: Path) -> Generator[tuple[int, dict[str, _TensorLocation]], None, None]:
    """The descriptor of an open safetensors file, and the location of each tensor, with offsets from the start of the
    file. Errors of reading in the body are converted to ModelRefused as well.
    """
    with _reading(path):
        if not path.is_file():
            raise ModelRefused(f"{path.parent} lacks {path.name}")
    with _reading(path), path.open("rb", buffering=0) as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        length = int.from_bytes(_read_at(descriptor, 0, LENGTH_BYTES), "little")
        start = LENGTH_BYTES + length
        if length > MAX_HEADER_BYTES or start > size:
            raise ValueError("its header is too long")
        header = msgspec.json.decode(_read_at(descriptor, LENGTH_BYTES, length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        places = dict[str, _TensorLocation]()
        for name, entry in header.items():
            place = msgspec.json.decode(entry, type=_TensorLocation)
            begin, end = place.data_offsets
            if not 0 <= begin <= end <= size - start:
                raise ValueError(f"it ends before the end of its tensor {name}")
            places[name] = msgspec.structs.replace(place, data_offsets=(start + begin, start + end))
        yield descriptor, places


def _read_weights(path: Path) -> list[tuple[str, bytes]]:
    """Name and digest of each tensor of a safetensors file."""
    with _opened(path) as (descriptor, places):
        return [(name, _read_tensor(descriptor, name, place)) for name, place in places.items()]


def _read_tensor(descriptor: int, name: str, place: _TensorLocation) -> bytes:
    """The digest of a tensor of an open file."""
    start, end = place.data_offsets
    size = end - start
    digest = _hasher(msgspec.msgpack.encode((name, place.dtype, place.shape, size)))
    last = size - PIECE_BYTES
    reads = [(0, size)] if last <= 2 * PIECE_BYTES else [(at, PIECE_BYTES) for at in (0, last // 2, last)]
    for offset, count in reads:
        digest.update(_read_at(descriptor, start + offset, count))
    return digest.digest()


def _read_at(descriptor: int, offset: int, count: int) -> bytes:
    """Reads exactly `count` bytes. Raises ValueError at the end of the file."""
    found = os.pread(descriptor, count, offset)
    while 0 < len(found) < count and (more := os.pread(descriptor, count - len(found), offset + len(found))):
        found += more
    if len(found) < count:
        raise ValueError(f"it ends after {offset + len(found)} bytes")
    return found
