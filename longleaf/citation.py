"""Sources as a reader sees them: file, lines, share of attention, and text."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from longleaf.document_text import is_place, place_prefix
from longleaf.types import ContextText, Source


class Citation(msgspec.Struct, frozen=True, kw_only=True):
    """A source of an answer, with its place and its text."""

    file: str
    """Name of the file in which the text begins; empty if unknown."""
    line_start: int | None
    """Line of the first character in that file, counted from 1; without a file, in its document. None for text that was
    ingested as token ids."""
    line_end: int | None
    """Line of the last character; None if that is in another file."""
    share: float
    """Share of the answer's attention, from 0 to 1."""
    contrast: float | None
    """`share` minus the share that a neutral question gives to the source; None for the ranking `raw`."""
    drop: float | None
    """Decrease of the answer's log probability without the source, in nats; None unless it was confirmed."""
    text: str
    """The text of the source; empty if it is unknown."""
    last_file: str = ""
    """Name of the file in which the text ends, if that is another one."""
    tokens: tuple[int, int]
    """Positions [start, end) of its tokens in the context."""
    bytes: tuple[int, int] | None
    """Byte range [start, end) of its whole characters in the concatenated ingested texts, including the white space
    around `text`; None for text that was ingested as token ids."""

    @property
    def place(self) -> str:
        """The file and its lines, such as `guide.txt:12-14`, or its page, such as `report.pdf, page 7`; empty if they
        are unknown. Text of several files has the first and the last one: `a.txt:12 to b.txt`."""
        if not is_place(self.file) and (not self.file or self.line_start is None):
            return ""
        if self.last_file:
            start = self.file if is_place(self.file) else f"{self.file}:{self.line_start}"
            return f"{start} to {self.last_file.removeprefix(place_prefix(self.file))}"
        if is_place(self.file):
            return self.file
        end = f"-{self.line_end}" if self.line_end != self.line_start else ""
        return f"{self.file}:{self.line_start}{end}"

    @property
    def label(self) -> str:
        """The place; if it is unknown, the lines of the document or the tokens."""
        if self.place:
            return self.place
        if self.line_start is None:
            return f"tokens {self.tokens[0]:,}-{self.tokens[1]:,}"
        if self.line_end == self.line_start:
            return f"line {self.line_start:,}"
        return f"lines {self.line_start:,}-{self.line_end:,}"


def cite(source: Source, text: ContextText | None) -> Citation:
    """The citation of a source, whose text the service returned for its token range; None if it could not be read.
    Surrounding white space is removed from the text."""
    if text is None:
        text = ContextText(text="", token_start=source.token_start, token_end=source.token_end)
    line_start = line_end = text.line
    if line_start is not None:
        before = text.text[: len(text.text) - len(text.text.lstrip())]
        line_start += before.count("\n")
        line_end = line_start + text.text.strip().count("\n")
    is_text = text.byte_start is not None and text.byte_end is not None
    return Citation(
        file=text.file,
        last_file=text.last_file,
        line_start=line_start,
        line_end=None if text.last_file else line_end,
        share=source.share,
        contrast=source.contrast,
        drop=source.drop,
        text=text.text.strip(),
        tokens=(source.token_start, source.token_end),
        bytes=(text.byte_start or 0, text.byte_end or 0) if is_text else None,
    )


def joined(sources: Sequence[Source]) -> list[Source]:
    """Joins adjacent sources of the same file. Shares are added. The drop is the largest one, because each was measured
    separately."""
    found = list[tuple[int, Source]]()
    for rank, source in sorted(enumerate(sources), key=lambda each: each[1].token_start):
        if found and found[-1][1].token_end == source.token_start and found[-1][1].file == source.file:
            best, last = found.pop()
            found.append((min(best, rank), _join(last, source)))
        else:
            found.append((rank, source))
    return [source for _, source in sorted(found, key=lambda each: each[0])]


def _join(one: Source, two: Source) -> Source:
    drops = [each.drop for each in (one, two) if each.drop is not None]
    contrasts = [each.contrast for each in (one, two) if each.contrast is not None]
    larger = max(one, two, key=lambda each: each.largest_share)
    return replace(
        larger,
        token_start=one.token_start,
        token_end=two.token_end,
        share=one.share + two.share,
        contrast=sum(contrasts) if contrasts else None,
        drop=max(drops, default=None),
        bytes=(one.bytes[0], two.bytes[1]) if one.bytes and two.bytes else None,
        last_file=two.last_file,
        file=one.file,
    )
