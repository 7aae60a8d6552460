"""Names and offsets of the files in a document, so that the service can attribute text to files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from longleaf.client.documents import Document, Part, Readable, is_part, size_of
from longleaf.document_text import MAX_FILE_NAME, MAX_FILES, NamedPart, TextFile

MAX_NAMES_BYTES = 1 << 19
"""Limit for all names together: they are sent in one request, with the offsets."""


def files_of(document: Document) -> tuple[TextFile, ...]:
    """The files of the document and their offsets in its text. Empty if there are none or too many, or if an
    offset is unknown in advance: after a pipe, or in an iterator. Raises InvalidArgument for an unreadable file."""
    whole = is_part(document) or not isinstance(document, list | tuple)
    parts = (cast(Part, document),) if whole else cast(Sequence[Part], document)
    if not any(isinstance(part, Path | NamedPart) for part in parts):
        return ()
    files = list[TextFile]()
    for name, start in _starts(parts):
        if start is None:
            return ()
        if name or files:  # text before the first file needs no entry
            files.append(TextFile(name, start))
    is_many = len(files) > MAX_FILES or sum(len(file.name.encode()) for file in files) > MAX_NAMES_BYTES
    return () if is_many else tuple(files)


def _starts(parts: Sequence[Part]) -> Iterator[tuple[str, int | None]]:
    """The name and the offset of each part that is not empty; None for an unknown offset."""
    start: int | None = 0
    for part in parts:
        size = _size(part)
        if size != 0:
            yield _name(part), start
        start = None if start is None or size is None else start + size


def _size(part: Part) -> int | None:
    """The size in bytes; None if unknown in advance."""
    size = size_of(part)
    path = part.content if isinstance(part, NamedPart) else part
    if size is not None or not (isinstance(path, Path) and path.is_file()):
        return size
    with path.open("rb") as file:  # files of procfs report size 0 but have content
        return None if file.read(1) else 0


def _name(part: Part) -> str:
    """The client's name for the file, cut to its last MAX_FILE_NAME bytes. Empty if the part is not a file."""
    name = str(part) if isinstance(part, Path) else getattr(part, "name", "")
    if not isinstance(part, Path | NamedPart | Readable) or not isinstance(name, str) or name.startswith("<"):
        return ""
    return name.encode(errors="replace")[-MAX_FILE_NAME:].decode(errors="ignore")
