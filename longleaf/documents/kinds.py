"""Recognition of the kind of a file by its first bytes and its name."""

from pathlib import PurePosixPath
from typing import Literal, get_args

from longleaf.documents.errors import NotText, Unreadable

Kind = Literal["text", "pdf", "docx", "pptx", "html", "epub", "notebook", "zip", "tar"]
HEAD_BYTES = 1 << 16
"""First bytes of a file, which decide its kind."""
MARKUP_BYTES = 1 << 10

TITLES: dict[Kind, str] = {
    "text": "a text file",
    "pdf": "a PDF",
    "docx": "a Word document",
    "pptx": "a PowerPoint presentation",
    "html": "an HTML page",
    "epub": "an EPUB book",
    "notebook": "a notebook",
    "zip": "a zip archive",
    "tar": "a tar archive",
}
SUFFIXES: dict[str, Kind] = {
    ".pdf": "pdf",
    ".docx": "docx",
    ".docm": "docx",
    ".pptx": "pptx",
    ".pptm": "pptx",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".epub": "epub",
    ".ipynb": "notebook",
    ".zip": "zip",
    ".whl": "zip",
    ".tar": "tar",
    ".tgz": "tar",
    ".tbz2": "tar",
    ".txz": "tar",
    ".tar.gz": "tar",
    ".tar.bz2": "tar",
    ".tar.xz": "tar",
}
MEDIA_TYPES: dict[str, Kind] = {
    "application/pdf": "pdf",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": "pptx",
    "text/html": "html",
    "application/xhtml+xml": "html",
    "application/epub+zip": "epub",
    "application/x-ipynb+json": "notebook",
    "application/zip": "zip",
    "application/x-zip-compressed": "zip",
    "application/x-tar": "tar",
    "application/gzip": "tar",
    "application/x-gzip": "tar",
    "application/x-bzip2": "tar",
    "application/x-xz": "tar",
}
"""Media types of HTTP whose bodies are extracted."""
WITH_PACKAGES: frozenset[Kind] = frozenset(("pdf", "docx", "pptx", "html", "epub"))
"""Kinds whose readers need the packages of the extra `documents`."""
IN_ZIP: frozenset[Kind] = frozenset(("docx", "pptx", "epub", "zip"))
_ZIP_CONTENT: tuple[tuple[bytes, Kind], ...] = (
    (b"word/document.xml", "docx"),
    (b"ppt/presentation.xml", "pptx"),
    (b"mimetypeapplication/epub+zip", "epub"),
)
"""Bytes in the head of a zip file without a known suffix."""
_REFUSED_IN_ZIP = (
    (b"mimetypeapplication/vnd.oasis.opendocument", "is an OpenDocument file: save it as .docx, .pptx or PDF"),
    (b"xl/workbook.xml", "is a spreadsheet: save its sheets as CSV"),
)
_REFUSED = (
    (
        b"\xd0\xcf\x11\xe0",
        "is an Office file of the old format, or has a password: save it as .docx or .pptx, without a password",
    ),
    (b"{\\rtf", "is an RTF document: save it as .docx or PDF"),
    (b"%!PS-Adobe", "is a PostScript file: convert it to PDF"),
    (b"\x89PNG", "is a PNG image"),
    (b"\xff\xd8\xff", "is a JPEG image"),
    (b"GIF8", "is a GIF image"),
    (b"BM", "is a BMP image"),
    (b"II*\0", "is a TIFF image"),
    (b"MM\0*", "is a TIFF image"),
    (b"\0\0\1\0", "is an icon"),
    (b"RIFF", "is an image, a sound or a film"),
    (b"ID3", "is a sound file"),
    (b"OggS", "is a sound file"),
    (b"fLaC", "is a sound file"),
    (b"\x7fELF", "is a program"),
    (b"MZ", "is a program"),
    (b"\xca\xfe\xba\xbe", "is a program"),
    (b"\xcf\xfa\xed\xfe", "is a program"),
    (b"SQLite format 3\0", "is a database"),
    (b"7z\xbc\xaf\x27\x1c", "is a 7z archive: repack it as zip or tar"),
    (b"Rar!\x1a\x07", "is a RAR archive: repack it as zip or tar"),
    (b"\x28\xb5\x2f\xfd", "is a file compressed with zstd: decompress it"),
    (b"wOFF", "is a font"),
    (b"wOF2", "is a font"),
    (b"\0\1\0\0\0", "is a font"),
)
"""First bytes of formats that are not read. Texts may begin with a short one, which also needs a zero byte."""
_BOMS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


def kind_of(name: str, head: bytes, *, as_text: bool = False) -> Kind:
    """The kind of a file from its name and its first HEAD_BYTES bytes. With `as_text`, HTML pages and notebooks are
    text files. Raises Unreadable, with the reason, for a format that is not read."""
    suffix = suffix_of(name)
    if head.startswith(b"%PDF-"):
        return "pdf"
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return _kind_in_zip(SUFFIXES.get(suffix), head)
    if head[257:262] == b"ustar" or head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0")):
        return "tar"
    for begin, reason in _REFUSED:
        if head.startswith(begin) and (len(begin) > 4 or not head[:1].isascii() or b"\0" in head[:512]):
            raise Unreadable(reason)
    named = SUFFIXES.get(suffix, "text")
    if named == "pdf" and b"%PDF-" in head[:1024]:
        return "pdf"
    if named not in ("text", "html", "notebook"):
        if not head:
            raise Unreadable("is empty")
        raise Unreadable(f"is named {suffix}, but is not {TITLES[named]}")
    if not head.startswith(_BOMS) and (zero := head.find(b"\0")) >= 0:
        raise NotText(f"is not text: byte {zero:,} is zero")
    if as_text:
        return "text"
    return "html" if named == "text" and _is_html(head) else named


def suffix_of(name: str) -> str:
    """The suffix in lower case, such as .pdf or .tar.gz."""
    path = PurePosixPath(name.lower())
    last = "".join(path.suffixes[-2:])
    return last if last in SUFFIXES else path.suffix


def check_declared(declared: Kind, found: Kind) -> None:
    """Raises Unreadable if the media type of a file is that of another kind. Archives and formats within zip
    archives are distinguished by their readers."""
    is_same = found == declared or (found in IN_ZIP and declared in IN_ZIP)
    if not is_same and not (found == "text" and declared in ("html", "notebook")):
        raise Unreadable(f"is {TITLES[found]}, but was declared as {TITLES[declared]}")


def _kind_in_zip(named: Kind | None, head: bytes) -> Kind:
    for content, reason in _REFUSED_IN_ZIP:
        if content in head:
            raise Unreadable(reason)
    if named in IN_ZIP:
        return named
    if named is not None:
        raise Unreadable(f"is not {TITLES[named]}, but a zip archive")
    for content, kind in _ZIP_CONTENT:
        if content in head:
            return kind
    return "zip"


def _is_html(head: bytes) -> bool:
    begin = head[:MARKUP_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return begin.startswith((b"<!doctype html", b"<html"))


assert set(get_args(Kind)) == set(TITLES)
