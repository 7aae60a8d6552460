"""Small files of the kinds that are ingested, written by code."""

import io
import json
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
)


def pdf(pages: Sequence[str], *, catalog: str = "", compress: bool = False) -> bytes:
    """A PDF with one line of text per page; an empty text makes a page without any."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {catalog} >>".encode(),
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode("latin-1") if text else b""
        content = zlib.compress(content) if compress else content
        filters = "/Filter /FlateDecode" if compress else ""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {5 + 2 * i} 0 R >>".encode()
        )
        objects.append(f"<< /Length {len(content)} {filters} >>\nstream\n".encode() + content + b"\nendstream")
    return pdf_of_objects(objects)


def pdf_of_objects(objects: Sequence[bytes], trailer: str = "") -> bytes:
    """A PDF of these objects, numbered from 1; the first one is the catalog."""
    out, offsets = bytearray(b"%PDF-1.7\n"), list[int]()
    for number, content in enumerate(objects, start=1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n".encode() + content + b"\nendobj\n"
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{offset:010} 00000 n \n".encode() for offset in offsets)
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(out)


def docx(paragraphs: Sequence[str] = ("Hello.",), table: Sequence[Sequence[str]] = ()) -> bytes:
    """A Word document; a paragraph that begins with # is a heading, and one with - belongs to a list."""
    import docx as library

    document: Any = library.Document()
    for text in paragraphs:
        if text.startswith("# "):
            document.add_heading(text[2:], level=1)
        elif text.startswith("- "):
            document.add_paragraph(text[2:], style="List Bullet")
        else:
            document.add_paragraph(text)
    if table:
        made = document.add_table(rows=len(table), cols=len(table[0]))
        for i, row in enumerate(table):
            for j, text in enumerate(row):
                made.cell(i, j).text = text
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def pptx(slides: Sequence[tuple[str, str, str]] = (("Title", "Body", "Notes"),)) -> bytes:
    """A presentation of slides with a title, a text and notes."""
    import pptx as library

    presentation: Any = library.Presentation()
    for title, body, notes in slides:
        slide = presentation.slides.add_slide(presentation.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = body
        if notes:
            slide.notes_slide.notes_text_frame.text = notes
    out = io.BytesIO()
    presentation.save(out)
    return out.getvalue()


def epub(chapters: Sequence[str] = ("<p>One.</p>", "<p>Two.</p>")) -> bytes:
    """A book of these bodies."""
    names = [f"c{i}.xhtml" for i in range(len(chapters))]
    items = "".join(f'<item id="{n}" href="{n}" media-type="application/xhtml+xml"/>' for n in names)
    spine = "".join(f'<itemref idref="{n}"/>' for n in names)
    package = (
        f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    )
    files = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER, "OEBPS/book.opf": package}
    files |= {
        f"OEBPS/{name}": f"<html><head><title>t</title></head><body>{body}</body></html>"
        for name, body in zip(names, chapters, strict=True)
    }
    return zipped(files, zipfile.ZIP_STORED)


def notebook(cells: Sequence[tuple[str, str]] = (("markdown", "# Hello"), ("code", "print(1)"))) -> bytes:
    """A notebook of cells with kind and source."""
    made = [
        {"cell_type": kind, "source": [text], "outputs": [{"text": "out"}] * (kind == "code")} for kind, text in cells
    ]
    return json.dumps({"nbformat": 4, "metadata": {"language_info": {"name": "python"}}, "cells": made}).encode()


def zipped(files: Mapping[str, str | bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(files: Mapping[str, str | bytes], mode: str = "w", others: Sequence[tarfile.TarInfo] = ()) -> bytes:
    """A tar archive, with further members without content."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # pyright: ignore[reportArgumentType, reportCallIssue]
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in others:
            archive.addfile(info)
    return out.getvalue()
