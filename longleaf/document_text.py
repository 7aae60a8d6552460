"""Mapping from a document's tokens to its text: byte offsets, and the files that the text was assembled from."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from longleaf.errors import InvalidArgument
from longleaf.little_endian import unpack

STRIDE = 64
"""Byte offsets are stored for every STRIDE-th token."""
OFFSET_BYTES = 8
MAX_FILES = 65_536
MAX_FILE_NAME = 1024
"""In UTF-8 bytes."""
MAX_FILE_NAMES = 8 << 20
"""UTF-8 bytes of all file names of a document."""
FILE_BYTES = 160
"""Memory per file, without its name."""
MAX_TEXT = 1 << 48
"""Bytes of a text."""


class TextFile(msgspec.Struct, frozen=True):
    """Start of a file in the text of a document. An empty name marks the start of text that belongs to no file."""

    name: str
    start: int
    """In bytes."""


class NamedPart(msgspec.Struct, frozen=True):
    """A part of a document that belongs to a file, or to a place in it, such as a page."""

    name: str
    """Name of the file, or of the place, such as "report.pdf, page 7"."""
    content: str | Path
    """The text, or the file with it, in UTF-8."""


class DocumentText(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets into the text of one document. It belongs to the document's segment: a segment is one document and never
    changes once sealed, so forks and appends share both the ids and this mapping, and a path that is cut anywhere needs
    only the positions at which its segments are cut.
    """

    num_lead: int
    """Tokens before the first byte: the opening of the chat template."""
    starts: bytes
    """Byte offset of each STRIDE-th token of the segment: little-endian, OFFSET_BYTES each."""
    num_bytes: int
    files: tuple[TextFile, ...] = ()
    is_cut: bool = False
    """The last token ends before `num_bytes`, which is only an upper bound; the exact end follows from the token ids.
    """

    def start(self, number: int) -> int:
        """Byte offset of token `number` x STRIDE."""
        place = number * OFFSET_BYTES
        return int.from_bytes(self.starts[place : place + OFFSET_BYTES], "little")

    @property
    def num_buffered_bytes(self) -> int:
        """Memory usage."""
        return len(self.starts) + file_bytes(self.files)

    @property
    def num_starts(self) -> int:
        return len(self.starts) // OFFSET_BYTES

    def cut(self, num_tokens: int) -> "DocumentText":
        """The mapping of the first `num_tokens` tokens, as exact as possible without the ids."""
        num_retained = count_starts(num_tokens)
        num_bytes = self.start(num_retained) if num_retained < self.num_starts else self.num_bytes
        files = tuple(file for file in self.files if file.start < num_bytes)
        return DocumentText(
            num_lead=min(self.num_lead, num_tokens),
            starts=self.starts[: num_retained * OFFSET_BYTES],
            num_bytes=num_bytes,
            files=files,
            is_cut=True,
        )

    def check(self, num_tokens: int, field: str) -> None:
        """Raises InvalidArgument naming `field` if it does not match a segment of so many tokens."""
        if len(self.starts) != OFFSET_BYTES * count_starts(num_tokens):
            raise InvalidArgument(field, f"{len(self.starts):,} token offsets for {num_tokens:,} tokens")
        if not (0 <= self.num_lead <= num_tokens and 0 <= self.num_bytes <= MAX_TEXT):
            raise InvalidArgument(field, f"a text of {self.num_bytes} bytes has {self.num_lead} tokens before it")
        if any(a > b for a, b in pairwise([*unpack("Q", self.starts), self.num_bytes])):
            raise InvalidArgument(field, "tokens begin before those before them")
        check_files(self.files, field)


def count_starts(num_tokens: int) -> int:
    """Number of stored offsets for so many tokens."""
    return -(-num_tokens // STRIDE)


def check_files(files: Sequence[TextFile], field: str) -> None:
    """Raises InvalidArgument naming `field` for too many files, too long names, and starts that do not increase."""
    if len(files) > MAX_FILES:
        raise InvalidArgument(field, f"has {len(files):,} entries; the limit is {MAX_FILES:,}")
    before, num_name_bytes = -1, 0
    for i, file in enumerate(files):
        if (size := len(file.name.encode())) > MAX_FILE_NAME:
            raise InvalidArgument(f"{field}[{i}].name", f"has {size:,} bytes; the limit is {MAX_FILE_NAME:,}")
        num_name_bytes += size
        if num_name_bytes > MAX_FILE_NAMES:
            raise InvalidArgument(field, f"has names with more than {MAX_FILE_NAMES:,} bytes in total")
        if file.start <= before:
            message = f"{file.start} is negative" if file.start < 0 else f"{file.start} must be greater than {before}"
            raise InvalidArgument(f"{field}[{i}].byte_start", message)
        before = file.start


def file_bytes(files: Sequence[TextFile]) -> int:
    """Memory usage of the files."""
    return sum(FILE_BYTES + len(file.name.encode()) for file in files)


def file_at(files: Sequence[TextFile], byte: int) -> TextFile | None:
    """The file that contains a byte of the text; None before the first file."""
    index = bisect_right(files, byte, key=lambda file: file.start)
    return files[index - 1] if index else None


_PLACE = re.compile(r", (?=(?:page|slide|chapter|cell) [0-9]+$)")


def place_name(file: str, label: str) -> str:
    """The name of a place in a file, for `TextFile`: "report.pdf, page 7". Without a label, the name of the file."""
    return f"{file}, {label}" if label else file


def is_place(name: str) -> bool:
    """Whether a name is that of a place in a file, which is more useful than the line in its extracted text."""
    return _PLACE.search(name) is not None


def place_prefix(name: str) -> str:
    """The common start of the names of all places of a file: "report.pdf, "; empty for names of other kinds."""
    found = _PLACE.search(name)
    return name[: found.end()] if found else ""
