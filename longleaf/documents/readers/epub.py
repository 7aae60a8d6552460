"""EPUB books, chapter by chapter in reading order."""

import posixpath
import zipfile
from collections.abc import Iterator
from io import BytesIO
from typing import Any
from urllib.parse import unquote

from longleaf.documents.errors import LimitExceeded, Unreadable
from longleaf.documents.limits import ExtractionLimits
from longleaf.documents.readers.html import etree, text_of
from longleaf.documents.sections import Section
from longleaf.documents.text_files import decode_markup

CONTAINER = "META-INF/container.xml"
ENCRYPTION = "META-INF/encryption.xml"
PAGES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")


def sections(data: bytes, limits: ExtractionLimits) -> Iterator[Section]:
    """One section per document of the reading order."""
    try:
        with zipfile.ZipFile(BytesIO(data)) as book:
            yield from _chapters(_Book(book, limits), limits)
    except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError, etree.XMLSyntaxError) as error:
        raise Unreadable("is a damaged EPUB book") from error


class _Book:
    """The files of a book, with a limit on their size."""

    def __init__(self, book: zipfile.ZipFile, limits: ExtractionLimits) -> None:
        self._book, self._limits = book, limits
        self._num_bytes = 0
        self.names = frozenset(book.namelist())

    def read(self, name: str) -> bytes:
        """Raises KeyError for a missing file, and LimitExceeded."""
        self._num_bytes += self._book.getinfo(name).file_size
        if self._num_bytes > self._limits.expanded_bytes:
            raise LimitExceeded(f"has more than {self._limits.expanded_bytes:,} decompressed bytes")
        return self._book.read(name)


def _chapters(book: _Book, limits: ExtractionLimits) -> Iterator[Section]:
    if ENCRYPTION in book.names and CONTAINER not in book.names:
        raise Unreadable("is encrypted")
    container = _parsed(book.read(CONTAINER))
    root = next((each.get("full-path") for each in container.iter("{*}rootfile")), None)
    if root is None:
        raise Unreadable("is not an EPUB book: it names no contents")
    package = _parsed(book.read(root))
    folder = posixpath.dirname(root)
    items = {each.get("id"): each for each in package.iter("{*}manifest") for each in each.iter("{*}item")}
    spine = [items[each.get("idref")] for each in package.iter("{*}itemref") if each.get("idref") in items]
    if len(spine) > limits.num_pages:
        raise LimitExceeded(f"has {len(spine):,} chapters; the limit is {limits.num_pages:,}")
    number = 0
    for item in spine:
        name = posixpath.normpath(posixpath.join(folder, unquote(item.get("href", "").partition("#")[0])))
        if item.get("media-type") in PAGES and name in book.names:
            number += 1
            yield Section(f"chapter {number}", text_of(decode_markup(book.read(name))))


def _parsed(xml: bytes) -> Any:
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    return etree.fromstring(xml, parser)
