"""Text of HTML pages: headings, paragraphs, lists, tables and preformatted text, without scripts and styles."""

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from longleaf.documents.errors import Unreadable
from longleaf.documents.limits import ExtractionLimits
from longleaf.documents.sections import Section
from longleaf.documents.text_files import decode_markup

etree: Any = import_module("lxml.etree")  # it has no types
HIDDEN = frozenset("script style template noscript svg math iframe object head select button nav dialog".split())
"""Elements without text for a reader. `head` has the title, which is added."""
HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
BLOCKS = frozenset(
    "p div section article main header footer aside address blockquote figure figcaption ul ol dl dt dd table caption "
    "pre form fieldset details summary hr body html tr h1 h2 h3 h4 h5 h6".split()
)
TIGHT = frozenset("li tr dt dd br option".split())
"""Elements that begin a line, without an empty line before them."""
SPACE = re.compile(r"[ \t\n\r\f\u00a0]+")
ENCODING_DECLARATION = re.compile(r"^\s*<\?xml[^>]{0,200}\?>")


def sections(data: bytes, limits: ExtractionLimits) -> Iterator[Section]:
    """One section."""
    del limits
    yield Section("", text_of(decode_markup(data)))


def text_of(markup: str) -> str:
    """The readable text of a page. Raises Unreadable if it cannot be parsed."""
    # a declared encoding is refused in decoded text
    markup = ENCODING_DECLARATION.sub("", markup, count=1).replace("\0", "")
    if not markup.strip():
        return ""
    parser = etree.HTMLParser(no_network=True, remove_comments=True, remove_pis=True, huge_tree=False)
    try:
        root: Any = etree.fromstring(markup, parser)
    except (etree.XMLSyntaxError, ValueError):
        raise Unreadable("is not HTML that can be parsed") from None
    if root is None:
        return ""
    title = root.find(".//head/title")
    page = _PageText()
    page.read(root)
    text = page.text()
    name = SPACE.sub(" ", (title.text or "") if title is not None else "").strip()
    return f"{name}\n\n{text}" if name and not text.lstrip("# ").startswith(name) else text


class _PageText:
    """Collects lines."""

    def __init__(self) -> None:
        self._lines = list[str]()
        self._line = list[str]()
        self._has_words = False
        """Whether the line has more than the mark of a heading or a list."""
        self._num_hidden = 0
        self._num_preformatted = 0
        self._num_cells = 0

    def read(self, root: Any) -> None:
        """Reads all elements, iteratively: pages may be nested deeply."""
        for event, element in etree.iterwalk(root, events=("start", "end")):
            tag = element.tag if isinstance(element.tag, str) else ""
            if event == "start":
                self._start(tag, element)
                self._add(element.text)
            else:
                self._end(tag)
                self._add(element.tail)

    def text(self) -> str:
        self._break()
        return "\n".join(self._lines).strip()

    def _start(self, tag: str, element: Any) -> None:
        if tag in HIDDEN:
            self._num_hidden += 1
        elif self._num_hidden:
            return
        elif tag == "pre":
            self._paragraph()
            self._num_preformatted += 1
        elif tag in ("td", "th"):
            if self._num_cells:
                self._append(" | ")
            self._num_cells += 1
        elif tag in TIGHT:
            self._break()
            self._num_cells = 0
            if tag == "li":
                self._append("- ")
        elif tag in BLOCKS and not self._num_cells:
            self._paragraph()
            self._append(HEADINGS.get(tag, ""))
        elif tag == "img" and (text := element.get("alt")):
            self._add(text[:1000])

    def _end(self, tag: str) -> None:
        if tag in HIDDEN:
            self._num_hidden -= 1
        elif self._num_hidden:
            return
        elif tag == "pre":
            self._break()
            self._num_preformatted -= 1
            self._paragraph()
        elif tag in TIGHT and tag != "br":
            self._break()
            self._num_cells = 0
        elif tag in BLOCKS and not self._num_cells:
            self._paragraph()

    def _add(self, text: str | None) -> None:
        if not text or self._num_hidden:
            return
        if not self._num_preformatted:
            text = SPACE.sub(" ", text)
            is_at_start = not self._has_words and not (self._line and text.strip())
            self._append(text.lstrip() if is_at_start or "".join(self._line[-1:]).endswith(" ") else text)
            return
        first, *rest = text.split("\n")
        self._append(first)
        for line in rest:
            self._break()
            self._append(line)

    def _append(self, piece: str) -> None:
        self._line.append(piece)
        self._has_words = self._has_words or bool(piece.strip("# -"))

    def _break(self) -> None:
        """Ends the line."""
        line = "".join(self._line)
        self._line.clear()
        self._has_words = False
        if self._num_preformatted:
            self._lines.append(line.rstrip())
        elif line.strip("# -"):
            self._lines.append(line.strip())

    def _paragraph(self) -> None:
        """Ends the line, and leaves an empty one."""
        self._break()
        if self._lines and self._lines[-1]:
            self._lines.append("")
