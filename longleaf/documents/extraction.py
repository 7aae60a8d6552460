"""Extraction of the text of one file of any kind. Runs in the confined process."""

from collections.abc import Callable, Iterator
from importlib import import_module

from longleaf.documents.archives import MAX_NAME, ArchiveBudget, ArchiveMember, tar_members, zip_members
from longleaf.documents.errors import LimitExceeded, NotText, Unreadable
from longleaf.documents.kinds import HEAD_BYTES, MEDIA_TYPES, TITLES, Kind, check_declared, kind_of
from longleaf.documents.messages import (
    MAX_LABEL,
    MAX_PATH,
    MAX_REASON,
    MAX_TEXT,
    ExtractionEnded,
    ExtractionRequest,
    MemberSkipped,
    MemberStarted,
    Message,
    Remark,
    TextFound,
)
from longleaf.documents.sections import Reader, ranges
from longleaf.documents.text_files import decode, without_controls
from longleaf.formatting import printable

MAX_NUMBERS = 400
"""Characters of the numbers of pages in a remark."""
READERS: dict[Kind, str] = {
    "pdf": "pdf",
    "docx": "word",
    "pptx": "slides",
    "html": "html",
    "epub": "epub",
    "notebook": "notebook",
}
"""Modules of `longleaf.documents.readers`."""
ARCHIVES: dict[Kind, Callable[[bytes, ArchiveBudget], Iterator[ArchiveMember]]] = {
    "zip": zip_members,
    "tar": tar_members,
}


def reader_of(kind: Kind) -> Reader:
    """Imports the reader of a kind. Raises ImportError if its packages are not installed."""
    return import_module(f"longleaf.documents.readers.{READERS[kind]}").sections


def import_readers() -> None:
    """Imports all readers whose packages are installed, because a confined process cannot open modules."""
    for kind in READERS:
        try:
            reader_of(kind)
        except ImportError:
            continue


class Extraction:
    """Extracts one file, and yields the messages of the process."""

    def __init__(self, request: ExtractionRequest) -> None:
        self._request, self._limits = request, request.limits
        self._budget = ArchiveBudget(request.limits)
        self._num_bytes = 0
        self._num_sections = 0
        self._num_texts = 0

    def messages(self, data: bytes) -> Iterator[Message]:
        """All messages, the last of which is ExtractionEnded."""
        request = self._request
        try:
            if len(data) > self._limits.file_bytes:
                raise LimitExceeded(f"has more than {self._limits.file_bytes:,} bytes")
            kind = self._kind_of(data)
            if (declared := MEDIA_TYPES.get(request.declared)) is not None:
                check_declared(declared, kind)
                kind = declared if kind in ("text", "zip") else kind
            yield from self._file(kind, data, "", 1)
            if self._num_texts == 0:
                raise Unreadable("has no members that can be read" if kind in ARCHIVES else "has no text")
            yield ExtractionEnded()
        except (Unreadable, LimitExceeded) as error:
            yield ExtractionEnded(str(error)[:MAX_REASON])
        except MemoryError:
            yield ExtractionEnded(f"needs more than {self._limits.memory_bytes:,} bytes of memory")

    def _kind_of(self, data: bytes) -> Kind:
        """The kind of the whole file. Raises Unreadable."""
        try:
            return kind_of(self._request.name, data[:HEAD_BYTES], as_text=self._request.as_text)
        except NotText:
            if not self._request.encoding:
                raise
            return "text"  # charsets such as UTF-16 have zero bytes

    def _file(self, kind: Kind, data: bytes, path: str, depth: int) -> Iterator[Message]:
        """The texts of a file, or of a member with this path. Raises Unreadable and LimitExceeded."""
        if kind in ARCHIVES:
            yield from self._archive(kind, data, path, depth)
            return
        if kind == "text":
            yield from self._text(path, decode(data, self._request.encoding))
            return
        num_found, empty, num_sections = 0, list[int](), 0
        try:
            for number, section in enumerate(reader_of(kind)(data, self._limits), start=1):
                text = without_controls(section.text).strip("\n")
                num_sections += 1
                if not text.strip():
                    empty.append(number)
                    continue
                if num_found == 0:
                    yield MemberStarted(path)
                yield from self._pieces(section.label, f"{text}\n\n")
                num_found += 1
        except (Unreadable, LimitExceeded, MemoryError):
            raise
        except ImportError:
            raise Unreadable(f"is {TITLES[kind]}, whose reader is not installed") from None
        except Exception as error:  # parsers raise exceptions of any kind for damaged files
            raise Unreadable(f"is damaged, or is not {TITLES[kind]} ({type(error).__name__})") from None
        if num_found == 0:
            raise Unreadable(_no_text(kind, num_sections))
        self._num_texts += 1
        if empty and kind == "pdf":
            pages = "page" if len(empty) == 1 else "pages"
            self._count_section()
            yield Remark(path, f"has no text on {pages} {_shortened(ranges(empty))}, which may be scanned")

    def _text(self, path: str, text: str) -> Iterator[Message]:
        if not text:
            raise Unreadable("is empty")
        yield MemberStarted(path)
        yield from self._pieces("", text)
        self._num_texts += 1

    def _pieces(self, label: str, text: str) -> Iterator[Message]:
        self._num_bytes += len(text.encode())
        if self._num_bytes > self._limits.text_bytes:
            raise LimitExceeded(f"has more than {self._limits.text_bytes:,} bytes of text")
        for start in range(0, len(text), MAX_TEXT):
            self._count_section()
            yield TextFound(label[:MAX_LABEL], text[start : start + MAX_TEXT])

    def _count_section(self) -> None:
        """Counts a section, or a member without text. Raises LimitExceeded."""
        self._num_sections += 1
        if self._num_sections > self._limits.num_sections:
            raise LimitExceeded(f"has more than {self._limits.num_sections:,} sections")

    def _archive(self, kind: Kind, data: bytes, path: str, depth: int) -> Iterator[Message]:
        if depth > self._limits.depth:
            raise Unreadable(f"is an archive on level {depth}; the limit is {self._limits.depth}")
        for member in ARCHIVES[kind](data, self._budget):
            name = printable(member.name[:MAX_NAME])
            yield from self._member(member, (f"{path}/{name}" if path else name)[:MAX_PATH], depth)

    def _member(self, member: ArchiveMember, path: str, depth: int) -> Iterator[Message]:
        if member.refused:
            self._count_section()
            yield MemberSkipped(path, member.refused[:MAX_REASON])
            return
        try:
            kind = kind_of(member.name, member.data[:HEAD_BYTES], as_text=self._request.as_text)
            yield from self._file(kind, member.data, path, depth + 1)
        except Unreadable as error:
            self._count_section()
            yield MemberSkipped(path, str(error)[:MAX_REASON])


def _shortened(numbers: str) -> str:
    """A list of numbers that fits into a remark."""
    return numbers if len(numbers) <= MAX_NUMBERS else f"{numbers[:MAX_NUMBERS].rpartition(',')[0]} and others"


def _no_text(kind: Kind, num_sections: int) -> str:
    if kind == "pdf":
        pages = "1 page" if num_sections == 1 else f"{num_sections:,} pages"
        return f"has {pages} and no text: if it is a scan, recognize its text first (OCR)"
    return "has no text"
