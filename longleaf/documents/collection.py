"""Collection of the files of a document: text files as they are, the text of other files, folders and archives."""

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from longleaf.document_text import NamedPart, place_name
from longleaf.documents.errors import NotText, Unreadable
from longleaf.documents.extraction_process import ExtractedFile, FileSection, LeftOut, extract
from longleaf.documents.folder_walk import FolderWalk
from longleaf.documents.kinds import HEAD_BYTES, WITH_PACKAGES, Kind, kind_of
from longleaf.documents.limits import LIMITS, ExtractionLimits
from longleaf.documents.text_files import bom_of, decode, find_invalid_utf8
from longleaf.errors import InvalidArgument
from longleaf.extras import require_extra
from longleaf.formatting import printable

STANDARD_INPUT = "standard input"
COPY_BYTES = 1 << 20
Part = NamedPart | BinaryIO


@dataclass(frozen=True)
class SourceFile:
    """A file with text: a part for the client, or sections."""

    name: str
    part: NamedPart | BinaryIO | None = None
    """A file or stream that is sent as it is."""
    sections: tuple[FileSection, ...] = ()


@dataclass
class Collection:
    """The files of a document."""

    files: list[SourceFile] = field(default_factory=list[SourceFile])
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])
    remarks: list[LeftOut] = field(default_factory=list[LeftOut])
    is_from_many: bool = False
    """Whether a folder or an archive was given, so that a summary is of interest."""

    def parts(self, headers: bool | None = None) -> list[Part]:
        """The parts of the document for the client. With `headers` (None: if there is more than one file), each file
        begins with a line with its name."""
        with_headers = len(self.files) > 1 if headers is None else headers
        parts = list[Part]()
        for file in self.files:
            if with_headers:
                parts.append(NamedPart(file.name, header_of(file.name, is_first=not parts)))
            parts += [file.part] if file.part is not None else merged(file.sections)
        return parts


def header_of(name: str, *, is_first: bool) -> str:
    """The lines before the text of a file."""
    return ("" if is_first else "\n\n") + f"===== {name} =====\n\n"


def merged(sections: Iterable[FileSection]) -> list[NamedPart]:
    """The sections as texts named after their places; pieces of one place are joined."""
    found = list[tuple[str, list[str]]]()
    for section in sections:
        name = place_name(section.file, section.label)
        if found and found[-1][0] == name:
            found[-1][1].append(section.text)
        else:
            found.append((name, [section.text]))
    return [NamedPart(name, "".join(texts)) for name, texts in found]


def files_of(extracted: ExtractedFile) -> list[SourceFile]:
    """The files of an extracted file, which are several for an archive."""
    found = list[tuple[str, list[FileSection]]]()
    for section in extracted.sections:
        if not found or found[-1][0] != section.file:
            found.append((section.file, []))
        found[-1][1].append(section)
    return [SourceFile(name, sections=tuple(sections)) for name, sections in found]


class Collector:
    """Collects files; see `Collection`."""

    def __init__(
        self,
        *,
        encoding: str = "",
        as_text: bool = False,
        limits: ExtractionLimits = LIMITS,
        on_section: Callable[[FileSection], None] | None = None,
    ) -> None:
        """`encoding` is the charset of text files without a byte order mark; with `as_text`, HTML pages and notebooks
        are read as text files."""
        self._encoding = "" if encoding == "utf-8" else encoding
        self._as_text, self._limits, self._on_section = as_text, limits, on_section
        self._collection = Collection()

    def collect(self, arguments: Sequence[str], standard_input: BinaryIO | None = None) -> Collection:
        """The files with these names; a folder stands for its files, and - for standard input. Raises InvalidArgument
        naming the file, if one of the arguments cannot be read. Files in folders and in archives are left out then."""
        found = self._collection = Collection()
        for argument in arguments:
            if argument != "-":
                _check_exists(Path(argument))
        is_single = len(arguments) == 1
        for argument in arguments:
            path = Path(argument)
            name = printable(str(path))
            if argument == "-":
                assert standard_input is not None
                self._add_stream(standard_input)
            elif path.is_dir():
                require_extra("documents", f"ingesting the folder {name}")
                self._add_folder(path)
            elif path.is_file():
                self._add_file(path, name, is_single=is_single)
            else:  # pipes can be read once
                found.files.append(SourceFile(name, NamedPart(name, path)))
        return found

    def _add_folder(self, folder: Path) -> None:
        found = self._collection
        found.is_from_many = True
        for file in list(FolderWalk(folder).files()):  # too many are an error before any is read
            if file.refused:
                found.left_out.append(LeftOut(file.name, file.refused))
                continue
            try:
                self._add_member(file.path, file.name)
            except InvalidArgument as error:
                found.left_out.append(LeftOut(file.name, error.description))
            except OSError as error:
                found.left_out.append(LeftOut(file.name, f"cannot be read: {error.strerror}"))

    def _add_member(self, path: Path, name: str) -> None:
        """Adds a file of a folder. Raises InvalidArgument if it has no text."""
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            try:
                kind = kind_of(name, head, as_text=self._as_text)
                if not head:
                    raise Unreadable("is empty")
            except Unreadable as error:
                raise InvalidArgument(name, str(error)) from None
            if kind != "text":
                self._extract(file, name, kind)
                return
        self._add_text(path, name, head, is_checked=True)

    def _add_file(self, path: Path, name: str, *, is_single: bool) -> None:
        """Adds a file that was given by its name."""
        try:
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
                if not head and not is_single:
                    self._collection.left_out.append(LeftOut(name, "is empty"))
                    return
                try:
                    kind = kind_of(name, head, as_text=self._as_text)
                except NotText as error:
                    if not self._encoding:
                        raise InvalidArgument(name, str(error)) from None
                    kind = "text"  # charsets such as UTF-16 have zero bytes
                except Unreadable as error:
                    raise InvalidArgument(name, str(error)) from None
                if kind != "text":
                    self._extract(file, name, kind)
                    return
            self._add_text(path, name, head, is_checked=False)
        except OSError as error:
            raise InvalidArgument("file", f"{name} cannot be read: {error.strerror}") from None

    def _add_text(self, path: Path, name: str, head: bytes, *, is_checked: bool) -> None:
        """Adds a text file: as it is if it is UTF-8 without a byte order mark, decoded otherwise."""
        if not (self._encoding or bom_of(head)[0]):
            if is_checked and (reason := find_invalid_utf8(path)):
                raise InvalidArgument(name, reason)
            self._collection.files.append(SourceFile(name, NamedPart(name, path)))
            return
        if (size := path.stat().st_size) > self._limits.file_bytes:
            limit = self._limits.file_bytes
            raise InvalidArgument(name, f"has {size:,} bytes; the limit for this encoding is {limit:,}")
        self._add_decoded(path.read_bytes(), name)

    def _add_decoded(self, data: bytes, name: str) -> None:
        try:
            text = decode(data, self._encoding)
        except Unreadable as error:
            raise InvalidArgument(name, str(error)) from None
        if not text:
            raise InvalidArgument(name, "is empty")
        if (zero := text.find("\0", 0, HEAD_BYTES)) >= 0:
            raise InvalidArgument(name, f"is not text: character {zero:,} is zero")
        self._collection.files.append(SourceFile(name, sections=(FileSection(name, "", text),)))

    def _add_stream(self, stream: BinaryIO) -> None:
        """Adds standard input, which is read to its end unless it is UTF-8 text."""
        peek = getattr(stream, "peek", None)
        head: bytes = peek(HEAD_BYTES)[:HEAD_BYTES] if peek is not None else b""
        try:
            kind = kind_of("", head, as_text=self._as_text)
        except NotText:
            kind = "text"
        except Unreadable as error:
            raise InvalidArgument(STANDARD_INPUT, str(error)) from None
        if kind != "text":
            try:
                with tempfile.TemporaryFile() as file:
                    _copy(stream, file, self._limits.file_bytes)
                    self._extract(file, STANDARD_INPUT, kind)
            except OSError as error:
                raise InvalidArgument(STANDARD_INPUT, f"cannot be stored: {error.strerror}") from None
        elif self._encoding or bom_of(head)[0]:
            whole = BytesIO()
            _copy(stream, whole, self._limits.file_bytes)
            self._add_decoded(whole.getvalue(), STANDARD_INPUT)
        else:
            self._collection.files.append(SourceFile(STANDARD_INPUT, stream))

    def _extract(self, file: BinaryIO, name: str, kind: Kind) -> None:
        if kind in WITH_PACKAGES:
            require_extra("documents", f"reading {name}")
        file.seek(0)
        os.lseek(file.fileno(), 0, os.SEEK_SET)  # the process reads by the descriptor
        found = extract(
            file,
            name,
            limits=self._limits,
            encoding=self._encoding,
            as_text=self._as_text,
            on_section=self._on_section,
        )
        collection = self._collection
        collection.is_from_many |= kind in ("zip", "tar")
        collection.files += files_of(found)
        collection.left_out += found.left_out
        collection.remarks += found.remarks


def _check_exists(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        raise InvalidArgument("file", f"{printable(str(path))} cannot be read: {error.strerror}") from None


def _copy(source: BinaryIO, target: BinaryIO, max_bytes: int) -> None:
    """Copies a stream. Raises InvalidArgument for more than `max_bytes`."""
    left = max_bytes
    while piece := source.read(min(COPY_BYTES, left + 1)):
        left -= len(piece)
        if left < 0:
            raise InvalidArgument(STANDARD_INPUT, f"has more than {max_bytes:,} bytes")
        target.write(piece)
    target.flush()
