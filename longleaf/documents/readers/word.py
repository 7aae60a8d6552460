"""Word documents: paragraphs, headings, lists and tables in their order, then notes."""

from collections.abc import Iterator
from typing import Any

import docx
from docx.opc.exceptions import PackageNotFoundError
from docx.table import Table

from longleaf.documents.errors import Unreadable
from longleaf.documents.limits import ExtractionLimits
from longleaf.documents.readers.office_package import checked
from longleaf.documents.sections import Section

NAMESPACE = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
NOTES = ("footnotes", "endnotes", "comments")
DEEPEST_TABLE = 8


def sections(data: bytes, limits: ExtractionLimits) -> Iterator[Section]:
    """One section: Word stores no page numbers."""
    package = checked(data, limits)
    try:
        document: Any = docx.Document(package)
    except (PackageNotFoundError, KeyError, ValueError) as error:
        raise Unreadable("is not a Word document") from error
    blocks = [*_blocks(document, 0), *_notes(document)]
    yield Section("", "\n\n".join(block for block in blocks if block.strip()))


def _blocks(parent: Any, depth: int) -> Iterator[str]:
    """The texts of paragraphs and tables of a document or of a cell."""
    for item in parent.iter_inner_content():
        if isinstance(item, Table):
            yield "\n".join(_rows(item, depth))
        else:
            yield _paragraph(item)


def _paragraph(paragraph: Any) -> str:
    text = _text(paragraph._p)
    style = (paragraph.style.name or "") if paragraph.style is not None else ""
    kind, _, level = style.partition(" ")
    if style == "Title" and text.strip():
        return f"# {text}"
    if kind == "Heading" and level.isdecimal() and text.strip():
        return f"{'#' * min(6, int(level))} {text}"
    is_list = kind == "List" or paragraph._p.find(f"{NAMESPACE}pPr/{NAMESPACE}numPr") is not None
    return f"- {text}" if is_list and text.strip() else text


def _text(element: Any) -> str:
    """All text below an element, with links, insertions and text boxes, and without deletions."""
    found = list[str]()
    for each in element.iter(f"{NAMESPACE}t", f"{NAMESPACE}tab", f"{NAMESPACE}br", f"{NAMESPACE}cr"):
        match each.tag.removeprefix(NAMESPACE):
            case "t":
                found.append(each.text or "")
            case "tab" if each.getparent().tag == f"{NAMESPACE}r":  # a tab stop of the paragraph is none
                found.append("\t")
            case "br" | "cr":
                found.append("\n")
            case _:
                pass
    return "".join(found)


def _rows(table: Any, depth: int) -> Iterator[str]:
    if depth >= DEEPEST_TABLE:
        yield _text(table._tbl)
        return
    for row in table._tbl.tr_lst:
        cells = [" ".join(_text(cell).split()) for cell in row.tc_lst]
        yield "| " + " | ".join(cells) + " |"


def _notes(document: Any) -> Iterator[str]:
    """Texts of footnotes, endnotes and comments."""
    for part in document.part.package.iter_parts():
        name = str(part.partname).rpartition("/")[2].removesuffix(".xml")
        if name not in NOTES:
            continue
        root = getattr(part, "element", None)
        if root is None:
            root = _parsed(part.blob)
        notes = (_text(each).strip() for each in root)
        yield from (f"[{name.removesuffix('s')}] {note}" for note in notes if note)


def _parsed(blob: bytes) -> Any:
    from docx.oxml.parser import parse_xml  # resolves no entities

    return parse_xml(blob)
