"""The header of a GGUF file, checked against the size of the file before a library reads it.

The readers of transformers trust the header: a count, a length or an offset that the file does not have makes them
allocate memory or loop without end. `read_header` reads metadata and tensor table with limits, and never reads more
than the header. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import mmap
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from longleaf.errors import ModelRefused
from longleaf.fingerprint import PIECE_BYTES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ENTRIES = 100_000
"""Limit of entries in the metadata, and in the tensor table."""
MAX_ELEMENTS = 8_000_000
"""Limit of elements in all arrays of the metadata. A vocabulary of 262,144 tokens with scores, types and merges has
about 1,500,000. Readers create an object per element."""
MAX_STRING_BYTES = 1 << 24
MAX_DIMS = 4
FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Struct codes of metadata types with a fixed size."""
STRING, ARRAY = 8, 9
COUNTS = ("block_count", "expert_count")
"""Metadata by which a model is built, and which the tensors limit."""


class GgufTensor(msgspec.Struct, frozen=True):
    """A tensor of the file. `begin` and `end` are its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """Name of its quantization, such as Q4_K, or of its type, such as F32."""
    num_elements: int
    begin: int
    end: int


class GgufHeader(msgspec.Struct, frozen=True):
    """Metadata that are numbers, booleans or strings, and the tensor table."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    digest: str
    """Hexadecimal BLAKE3 of the header, the file's size, and three samples of 4 KiB of each tensor."""

    @property
    def num_elements(self) -> int:
        """Number of weights."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def kinds(self) -> dict[str, int]:
        """Number of tensors by their quantization, the most frequent first."""
        return dict(Counter(tensor.kind for tensor in self.tensors).most_common())


def read_header(path: Path) -> GgufHeader:
    """Reads and checks the header. Raises ModelRefused, with the path and the reason, if it cannot be used."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise _Invalid("it does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _read(content)
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}") from error
    except (_Invalid, UnicodeDecodeError) as error:
        reason = "it has text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ModelRefused(f"{path} is not a usable GGUF file: {reason}") from error


def _shown(name: str) -> str:
    """A name of the file, on one line."""
    return name[:100].encode("unicode_escape").decode()


class _Invalid(Exception):
    """The file violates the format, or a limit; the message completes a sentence."""


class _Cursor:
    """Reads values in order; raises _Invalid at the end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.position = 0
        self._content = content
        self._num_elements = 0

    def numbers(self, codes: str) -> tuple[Any, ...]:
        found = struct.Struct(f"<{codes}")
        self._require(found.size)
        values = found.unpack_from(self._content, self.position)
        self.position += found.size
        return values

    def skip(self, count: int) -> None:
        self._require(count)
        self.position += count

    def text(self) -> str:
        (length,) = self.numbers("Q")
        if length > MAX_STRING_BYTES:
            raise _Invalid(f"it has a text of {length:,} bytes")
        self._require(length)
        found = self._content[self.position : self.position + length]
        self.position += length
        return found.decode()

    def value(self, kind: int) -> Any:
        """A number, boolean or text; None for an array, which is skipped."""
        if kind in FIXED:
            return self.numbers(FIXED[kind])[0]
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise _Invalid(f"its metadata have a value of the unknown type {kind}")
        inner, count = self.numbers("IQ")
        self._num_elements += count
        if self._num_elements > MAX_ELEMENTS:
            raise _Invalid(f"its metadata have arrays of more than {MAX_ELEMENTS:,} values")
        if inner in FIXED:
            self.skip(count * struct.calcsize(f"<{FIXED[inner]}"))
        elif inner == STRING:
            for _ in range(count):
                self.text()
        else:
            raise _Invalid(f"its metadata contain an array of the unsupported type {inner}")
        return None

    def _require(self, count: int) -> None:
        if count > len(self._content) - self.position:
            raise _Invalid("it ends within its header")


def _read(content: mmap.mmap) -> GgufHeader:
    from blake3 import blake3

    cursor = _Cursor(content)
    cursor.skip(len(MAGIC))
    (version,) = cursor.numbers("I")
    if version not in VERSIONS:
        raise _Invalid(f"its version is {version:,}, and versions {' and '.join(map(str, VERSIONS))} are supported")
    num_tensors, num_metadata = cursor.numbers("QQ")
    for count, what in ((num_metadata, "metadata"), (num_tensors, "tensors")):
        if count > MAX_ENTRIES:
            raise _Invalid(f"it states {count:,} {what}, more than {MAX_ENTRIES:,}")
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        name = cursor.text()
        if name in metadata:
            raise _Invalid(f"its metadata have {_shown(name)} twice")
        metadata[name] = cursor.value(cursor.numbers("I")[0])
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Invalid(f"its alignment is {_shown(str(alignment))}, not a power of 2")
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(_locate(entry, start, alignment) for entry in entries)
    _check(metadata, tensors, len(content))
    digest = blake3(content[: cursor.position])
    digest.update(len(content).to_bytes(8, "little"))
    for tensor in tensors:
        last = max(tensor.begin, tensor.end - PIECE_BYTES)
        for begin in (tensor.begin, (tensor.begin + last) // 2, last):
            digest.update(content[begin : min(begin + PIECE_BYTES, tensor.end)])
    return GgufHeader(metadata, tensors, digest.hexdigest())


class _Entry(msgspec.Struct, frozen=True):
    """A row of the tensor table."""

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.text()
    (num_dims,) = cursor.numbers("I")
    if num_dims > MAX_DIMS:
        raise _Invalid(f"its tensor {_shown(name)} has {num_dims:,} dims")
    dims = cursor.numbers(f"{num_dims}Q")
    kind, offset = cursor.numbers("IQ")
    return _Entry(name, dims, kind, offset)


def _locate(entry: _Entry, start: int, alignment: int) -> GgufTensor:
    """The tensor of a row, whose bytes may lie beyond the end of the file. `start` is the begin of all tensors."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = _shown(entry.name)
    try:
        kind = GGMLQuantizationType(entry.kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise _Invalid(f"its tensor {name} has the unknown quantization {entry.kind}") from None
    num_elements = 1
    for dim in entry.dims:
        num_elements *= dim
    if not num_elements:
        raise _Invalid(f"its tensor {name} is empty")
    if entry.dims and entry.dims[0] % block:
        raise _Invalid(f"its tensor {name} has rows of {entry.dims[0]:,} values, not a multiple of {block}")
    if entry.offset % alignment:
        raise _Invalid(f"its tensor {name} has the offset {entry.offset:,}, which is not aligned to {alignment}")
    begin = start + entry.offset
    shape = tuple(reversed(entry.dims))
    return GgufTensor(entry.name, shape, kind.name, num_elements, begin, begin + num_elements // block * block_bytes)


def _check(metadata: dict[str, Any], tensors: tuple[GgufTensor, ...], size: int) -> None:
    """Checks the tensor table against the file, and the metadata against the tensor table."""
    if not isinstance(metadata.get("general.architecture"), str):
        raise _Invalid("it has no general.architecture")
    if not tensors:
        raise _Invalid("it has no tensors")
    if (parts := metadata.get("split.count")) and parts != 1:
        raise _Invalid(
            f"it is one of {_shown(str(parts))} parts: merge them, for example with llama-gguf-split --merge"
        )
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.begin):
        if tensor.end > size:
            raise _Invalid(f"its tensor {_shown(tensor.name)} ends at byte {tensor.end:,}, and the file has {size:,}")
        if tensor.begin < end:
            raise _Invalid(f"its tensor {_shown(tensor.name)} overlaps another one")
        end = tensor.end
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise _Invalid("it has a tensor twice")
    most = max(len(tensors), *(dim for tensor in tensors for dim in (0, *tensor.shape)))
    for name, value in metadata.items():
        if name.endswith(COUNTS) and not (isinstance(value, int) and 0 <= value <= most):
            raise _Invalid(f"its {_shown(name)} is {_shown(str(value))}, more than its tensors allow")
