"""Jupyter notebooks, cell by cell: Markdown, code and the textual outputs."""

import json
from collections.abc import Iterator
from typing import Any, cast

from longleaf.documents.errors import LimitExceeded, Unreadable
from longleaf.documents.limits import ExtractionLimits
from longleaf.documents.sections import Section
from longleaf.documents.text_files import decode

MAX_OUTPUT = 20_000
"""Characters of the outputs of one cell; longer ones are cut."""


def sections(data: bytes, limits: ExtractionLimits) -> Iterator[Section]:
    """One section per cell."""
    try:
        notebook = json.loads(decode(data))
    except (ValueError, RecursionError):
        raise Unreadable("is not a notebook: its JSON cannot be parsed") from None
    fields = _mapping(notebook)
    cells = fields.get("cells")
    if cells is None:  # before version 4
        cells = [cell for sheet in _list(fields.get("worksheets")) for cell in _list(_mapping(sheet).get("cells"))]
    if not isinstance(cells, list) or not (fields.get("nbformat") or cells):
        raise Unreadable("is not a notebook: it has no cells")
    found = cast(list[object], cells)
    if len(found) > limits.num_pages:
        raise LimitExceeded(f"has {len(found):,} cells; the limit is {limits.num_pages:,}")
    language = _language(fields)
    for number, cell in enumerate(found, start=1):
        yield Section(f"cell {number}", _cell(_mapping(cell), language))


def _language(fields: dict[str, Any]) -> str:
    metadata = _mapping(fields.get("metadata"))
    info, kernel = _mapping(metadata.get("language_info")), _mapping(metadata.get("kernelspec"))
    name = info.get("name") or kernel.get("language") or ""
    return name if isinstance(name, str) and name.isalnum() else ""


def _cell(cell: dict[str, Any], language: str) -> str:
    source = _text(cell.get("source", cell.get("input")))
    if cell.get("cell_type") != "code":
        return source
    blocks = [f"```{language}\n{source.rstrip()}\n```"] if source.strip() else []
    output = "\n".join(filter(None, (_output(_mapping(each)) for each in _list(cell.get("outputs")))))
    if len(output) > MAX_OUTPUT:
        output = f"{output[:MAX_OUTPUT]}\n[{len(output) - MAX_OUTPUT:,} further characters of output]"
    if output.strip():
        blocks.append(f"Output:\n```\n{output.rstrip()}\n```")
    return "\n\n".join(blocks)


def _output(output: dict[str, Any]) -> str:
    if output.get("output_type") in ("error", "pyerr"):
        return f"{_text(output.get('ename'))}: {_text(output.get('evalue'))}"
    data = _mapping(output.get("data"))
    return _text(output.get("text")) or _text(data.get("text/markdown")) or _text(data.get("text/plain"))


def _text(value: object) -> str:
    """A text, which notebooks also store as a list of lines."""
    if isinstance(value, list):
        return "".join(line for line in cast(list[object], value) if isinstance(line, str))
    return value if isinstance(value, str) else ""


def _mapping(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else []
