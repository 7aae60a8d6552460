"""Which files a document is put together of, for the service to tell where a text is from."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from longleaf.client.documents import Document, Part, Readable, is_part, size_of
from longleaf.document_text import MAX_FILE_NAME, MAX_FILES, TextFile

MAX_NAMES_BYTES = 1 << 19
"""Of all names: they go up in one request, with where the files begin."""


def files_of(document: Document) -> tuple[TextFile, ...]:
    """Where its files begin in its text. None where it has none, or where that is not known beforehand: behind a pipe,
    in parts that come one by one, of too many. Raises InvalidArgument for an unreadable file."""
    whole = is_part(document) or not isinstance(document, list | tuple)
    parts = (cast(Part, document),) if whole else cast(Sequence[Part], document)
    if not any(isinstance(part, Path) for part in parts):
        return ()
    files = list[TextFile]()
    for name, start in _starts(parts):
        if start is None:
            return ()
        if name or files:  # what comes before the first file needs no telling
            files.append(TextFile(name, start))
    is_many = len(files) > MAX_FILES or sum(len(file.name.encode()) for file in files) > MAX_NAMES_BYTES
    return () if is_many else tuple(files)


def _starts(parts: Sequence[Part]) -> Iterator[tuple[str, int | None]]:
    """The parts that are not empty, and where they begin, as far as that is known."""
    start: int | None = 0
    for part in parts:
        size = _size(part)
        if size != 0:
            yield _name(part), start
        start = None if start is None or size is None else start + size


def _size(part: Part) -> int | None:
    """In bytes; None when not known beforehand."""
    size = size_of(part)
    if size is not None or not (isinstance(part, Path) and part.is_file()):
        return size
    with part.open("rb") as file:  # it says that it is empty: so do files that the kernel makes up
        return None if file.read(1) else 0


def _name(part: Part) -> str:
    """As its client calls it, or the end of that; empty where it is no file."""
    name = str(part) if isinstance(part, Path) else getattr(part, "name", "") if isinstance(part, Readable) else ""
    if not isinstance(name, str) or name.startswith("<"):
        return ""
    return name.encode(errors="replace")[-MAX_FILE_NAME:].decode(errors="ignore")
