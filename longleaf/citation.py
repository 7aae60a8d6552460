"""Sources as a reader sees them: file, lines, share of attention, and text."""

import msgspec

from longleaf.types import ContextText, Source


class Citation(msgspec.Struct, frozen=True, kw_only=True):
    """A source of an answer, with its place and its text."""

    file: str
    """Name of the file in which the text begins; empty if unknown."""
    line_start: int | None
    """Line of the first character in that file, counted from 1; without a file, in its document. None for text that was
    ingested as token ids."""
    line_end: int | None
    """Line of the last character."""
    share: float
    """Share of the answer's attention, from 0 to 1."""
    drop: float | None
    """Decrease of the answer's log probability without the source, in nats; None unless it was confirmed."""
    text: str
    """The text of the source."""

    @property
    def place(self) -> str:
        """The file and its lines, such as `guide.txt:12-14`; empty if they are unknown."""
        if not self.file or self.line_start is None:
            return ""
        end = f"-{self.line_end}" if self.line_end != self.line_start else ""
        return f"{self.file}:{self.line_start}{end}"


def cite(source: Source, text: ContextText) -> Citation:
    """The citation of a source, whose text the service returned for its token range. Surrounding white space is removed
    from the text."""
    line_start = line_end = text.line
    if line_start is not None:
        before = text.text[: len(text.text) - len(text.text.lstrip())]
        line_start += before.count("\n")
        line_end = line_start + text.text.strip().count("\n")
    return Citation(
        file=text.file,
        line_start=line_start,
        line_end=line_end,
        share=source.share,
        drop=source.drop,
        text=text.text.strip(),
    )
