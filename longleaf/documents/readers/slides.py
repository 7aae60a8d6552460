"""PowerPoint presentations, slide by slide, with tables and notes."""

from collections.abc import Iterator
from typing import Any

import pptx
from pptx.exc import PackageNotFoundError

from longleaf.documents.errors import LimitExceeded, Unreadable
from longleaf.documents.limits import ExtractionLimits
from longleaf.documents.readers.office_package import checked
from longleaf.documents.sections import Section

DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"


def sections(data: bytes, limits: ExtractionLimits) -> Iterator[Section]:
    """One section per slide."""
    package = checked(data, limits)
    try:
        presentation: Any = pptx.Presentation(package)
        slides = list(presentation.slides)
    except (PackageNotFoundError, KeyError, ValueError) as error:
        raise Unreadable("is not a PowerPoint presentation") from error
    if len(slides) > limits.num_pages:
        raise LimitExceeded(f"has {len(slides):,} slides; the limit is {limits.num_pages:,}")
    for number, slide in enumerate(slides, start=1):
        title = slide.shapes.title
        blocks = [f"# {text}"] if title is not None and (text := _text(title._element).strip()) else []
        for shape in slide.shapes:
            if title is None or shape.shape_id != title.shape_id:
                blocks += _blocks(shape._element)
        if slide.has_notes_slide and (frame := slide.notes_slide.notes_text_frame) is not None:
            notes = frame.text.strip()
            blocks += [f"Notes: {notes}"] if notes else []
        yield Section(f"slide {number}", "\n\n".join(block for block in blocks if block.strip()))


def _blocks(shape: Any) -> Iterator[str]:
    """Texts of a shape with its tables and inner shapes."""
    tables = set(shape.iter(f"{DRAWING}tbl"))
    for each in shape.iter(f"{DRAWING}tbl", "{*}txBody"):
        if each in tables:
            rows = ("| " + " | ".join(map(_cell, row.iter(f"{DRAWING}tc"))) + " |" for row in each.iter(f"{DRAWING}tr"))
            yield "\n".join(rows)
        elif not any(parent in tables for parent in each.iterancestors()):
            yield _text(each)


def _cell(cell: Any) -> str:
    return " ".join(_text(cell).split())


def _text(element: Any) -> str:
    """The paragraphs of an element, one per line."""
    paragraphs = (
        "".join(
            "\n" if each.tag == f"{DRAWING}br" else each.text or ""
            for each in paragraph.iter(f"{DRAWING}t", f"{DRAWING}br")
        )
        for paragraph in element.iter(f"{DRAWING}p")
    )
    return "\n".join(paragraphs)
