"""Readers of formats, in this process."""

import json

import pytest

from longleaf.documents.errors import LimitExceeded, Unreadable
from longleaf.documents.extraction import Extraction, reader_of
from longleaf.documents.kinds import Kind
from longleaf.documents.limits import LIMITS, ExtractionLimits
from longleaf.documents.messages import (
    ExtractionEnded,
    ExtractionRequest,
    MemberSkipped,
    MemberStarted,
    Remark,
    TextFound,
)
from longleaf.documents.readers.html import text_of
from tests.support import document_samples as samples


def read(kind: Kind, data: bytes) -> list[tuple[str, str]]:
    return [(section.label, section.text) for section in reader_of(kind)(data, LIMITS)]


def extracted(name: str, data: bytes, limits: ExtractionLimits = LIMITS, **options: str) -> list[object]:
    return list(Extraction(ExtractionRequest(name=name, limits=limits, **options)).messages(data))


def test_pages_of_a_pdf_are_numbered() -> None:
    for compress in (False, True):
        data = samples.pdf(["First page", "", "Third page"], compress=compress)
        assert read("pdf", data) == [("page 1", "First page"), ("page 2", ""), ("page 3", "Third page")]


def test_divided_words_are_joined() -> None:
    [(_, text)] = read("pdf", samples.pdf(["a long exam-) Tj 0 -14 Td (ple of text"]))
    assert text == "a long example of text"


def test_pages_without_text_get_a_remark() -> None:
    found = extracted("a.pdf", samples.pdf(["x", "", "", "y", ""]))
    assert Remark("", "has no text on pages 2-3, 5, which may be scanned") in found
    assert found[-1] == ExtractionEnded()


def test_scanned_pdf_is_reported() -> None:
    [ended] = extracted("scan.pdf", samples.pdf(["", ""]))
    assert ended == ExtractionEnded("has 2 pages and no text: if it is a scan, recognize its text first (OCR)")


def test_word_document_keeps_headings_lists_and_tables() -> None:
    [(label, text)] = read("docx", samples.docx(["# Fees", "Grüße", "- one"], [["Badge", "12 euros"], ["Key", "7"]]))
    assert label == ""
    assert text == "# Fees\n\nGrüße\n\n- one\n\n| Badge | 12 euros |\n| Key | 7 |"


def test_slides_are_numbered_and_have_their_notes() -> None:
    found = read("pptx", samples.pptx([("Plan", "Ship it", "Greet all"), ("", "Second", "")]))
    assert found == [("slide 1", "# Plan\n\nShip it\n\nNotes: Greet all"), ("slide 2", "Second")]


def test_html_is_read_without_markup_scripts_and_styles() -> None:
    page = """<!doctype html><head><title>Handbook</title><style>p {color: red}</style></head><body>
    <script>alert(1)</script><h1>Fees</h1><p>The <b>badge</b>
    costs&nbsp;12&nbsp;euros.<br>Really.</p><ul><li>one<li>two</ul><table><tr><th>a<th>b<tr><td>1<td>2</table>
    <pre>if x:
        y</pre></body>"""
    assert text_of(page).split("\n") == [
        *("Handbook", "", "# Fees", "", "The badge costs 12 euros.", "Really.", "", "- one", "- two", ""),
        *("a | b", "1 | 2", "", "if x:", "        y"),
    ]


@pytest.mark.parametrize(
    "data",
    [
        '<meta charset="iso-8859-1"><p>Grüße'.encode("iso-8859-1"),
        "<p>Grüße".encode("utf-16"),
        "<p>Grüße".encode(),
        "<p>Grüße".encode("cp1252"),
        '<?xml version="1.0" encoding="utf-8"?><html><p>Grüße</p></html>'.encode(),
    ],
)
def test_charset_of_html_is_honoured(data: bytes) -> None:
    assert read("html", data) == [("", "Grüße")]


def test_chapters_follow_the_order_of_reading() -> None:
    assert read("epub", samples.epub()) == [("chapter 1", "t\n\nOne."), ("chapter 2", "t\n\nTwo.")]


def test_cells_of_a_notebook_are_markdown() -> None:
    found = read("notebook", samples.notebook())
    assert found == [("cell 1", "# Hello"), ("cell 2", "```python\nprint(1)\n```\n\nOutput:\n```\nout\n```")]


def test_members_of_archives_are_read_by_kind() -> None:
    inner = samples.zipped({"deep.txt": "deep"})
    files = {
        "a.md": "# A",
        "b/c.pdf": samples.pdf(["Page"]),
        "logo.png": b"\x89PNG\r\n\x1a\n\0",
        "in.zip": inner,
        "e": "",
    }
    for name, data in (("x.zip", samples.zipped(files)), ("x.tar.gz", samples.tarred(files, "w:gz"))):
        found = extracted(name, data)
        assert found == [
            *(MemberStarted("a.md"), TextFound("", "# A"), MemberStarted("b/c.pdf"), TextFound("page 1", "Page\n\n")),
            *(MemberSkipped("logo.png", "is a PNG image"), MemberStarted("in.zip/deep.txt"), TextFound("", "deep")),
            *(MemberSkipped("e", "is empty"), ExtractionEnded()),
        ]


def test_text_limit_is_exact() -> None:
    for size, reason in ((10, ""), (11, "has more than 10 bytes of text")):
        found = extracted("a.txt", b"x" * size, ExtractionLimits(text_bytes=10))
        assert found[-1] == ExtractionEnded(reason)


def test_number_of_pages_is_limited() -> None:
    with pytest.raises(LimitExceeded, match="has 3 pages; the limit is 2"):
        list(reader_of("pdf")(samples.pdf(["a", "b", "c"]), ExtractionLimits(num_pages=2)))


def test_notebook_without_cells_is_refused() -> None:
    for content in (b"[]", b"{}", b"[" * 100_000, b"\xff", json.dumps({"cells": 5}).encode()):
        with pytest.raises(Unreadable):
            read("notebook", content)


def test_declared_media_type_is_checked() -> None:
    [ended] = extracted("x", samples.pdf(["a"]), declared="text/html")
    assert ended == ExtractionEnded("is a PDF, but was declared as an HTML page")
    found = extracted("x", b"<p>Hi", declared="text/html")
    assert found == [MemberStarted(""), TextFound("", "Hi\n\n"), ExtractionEnded()]
    [*_, ended] = extracted("x", samples.docx(), declared="application/zip")
    assert ended == ExtractionEnded()
