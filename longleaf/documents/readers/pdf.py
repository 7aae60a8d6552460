"""PDF, page by page, with PDFium."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from longleaf.documents.errors import LimitExceeded, Unreadable
from longleaf.documents.limits import ExtractionLimits
from longleaf.documents.sections import Section

pdfium: Any = import_module("pypdfium2")  # it has no types
HYPHEN = "\ufffe"
"""PDFium's character for a hyphen with which a line divides a word."""
PASSWORD = 4
"""PDFium's error code for a missing password."""


def sections(data: bytes, limits: ExtractionLimits) -> Iterator[Section]:
    """One section per page, empty for a page without text."""
    try:
        document: Any = pdfium.PdfDocument(data)
        num_pages = len(document)
    except pdfium.PdfiumError as error:
        if getattr(error, "err_code", None) == PASSWORD or "password" in str(error).lower():
            raise Unreadable("is encrypted: save it without a password") from None
        raise Unreadable("is a damaged PDF") from None
    if num_pages > limits.num_pages:
        raise LimitExceeded(f"has {num_pages:,} pages; the limit is {limits.num_pages:,}")
    num_damaged = 0
    for number in range(num_pages):
        try:
            page = document[number]
            text_page = page.get_textpage()
            text: str = text_page.get_text_range()
            text_page.close()
            page.close()
        except pdfium.PdfiumError:
            num_damaged += 1
            text = ""
        yield Section(f"page {number + 1}", text.replace(HYPHEN, ""))
    if num_pages == 0 or num_damaged == num_pages:
        raise Unreadable("is a damaged PDF: none of its pages can be read")
