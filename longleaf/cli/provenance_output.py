"""What `longleaf ask --sources` asks, and prints under an answer: where it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from longleaf.cli.options import option
from longleaf.client import Client
from longleaf.errors import InvalidArgument
from longleaf.types import ContextText, Finished, GenerateOptions, Provenance, Source

SOURCES = "Where it comes from"
MARGIN = 24
"""Tokens that are shown before a source and behind it."""
CONTROLS = {code: "\ufffd" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
"""What terminals would obey, for `str.translate`."""


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Values of the flags, as they were typed."""

    sources: Annotated[
        bool, option(SOURCES, "Print under the answer which text its tokens attended to most.", "--sources")
    ] = False
    source_count: Annotated[int, option(SOURCES, "Spans of the context to tell with --sources, 1 to 64.")] = 8
    confirm: Annotated[
        bool,
        option(SOURCES, "Tell how much less likely the answer is without each source, in nats.", "--confirm"),
    ] = False
    contrast: Annotated[
        bool, option(SOURCES, "Rank by attention less that of tokens before the question.", "--contrast")
    ] = False
    hide: Annotated[
        list[str] | None,
        option(SOURCES, "Tokens A-B of the context that are not read; may be given several times.", default=False),
    ] = None

    def options(self) -> GenerateOptions:
        """The flags in the client's words. Raises InvalidArgument."""
        for name, is_given in (("--confirm", self.confirm), ("--contrast", self.contrast)):
            if is_given and not self.sources:
                raise InvalidArgument(name, "is of sources: give --sources, too")
        options = GenerateOptions(hidden=sorted(map(_range, self.hide or ())))
        if self.sources:
            ranking = "contrast" if self.contrast else "raw"
            options["provenance"] = Provenance(num_spans=self.source_count, ranking=ranking, confirm=self.confirm)
        return options


def _range(typed: str) -> tuple[int, int]:
    start, _, end = typed.partition("-")
    if not (start.isdecimal() and end.isdecimal()):
        raise InvalidArgument("--hide", f"{typed} is not A-B, tokens from A on and before B")
    return int(start), int(end)


def joined(sources: Sequence[Source]) -> list[Source]:
    """Sources, of which those are one that follow one another in the context. Their shares add up. Drops do not, for
    each was measured by itself: it is the largest."""
    found = list[tuple[int, Source]]()
    for rank, source in sorted(enumerate(sources), key=lambda each: each[1].token_start):
        if found and found[-1][1].token_end == source.token_start:
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
        file=one.file,
    )


class Excerpt(NamedTuple):
    """The text of a source, where it is, and what stands around it."""

    own: ContextText
    before: str
    text: str
    behind: str

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """What is read one after the other, each with its style."""
        return (self.before, "dim"), (self.text, "bold"), (self.behind, "dim")


def excerpt(client: Client, context: str, source: Source, num_tokens: int) -> Excerpt | None:
    """The text of a source of a context of so many tokens; None where it ends before: it is another one by now."""
    start, end = source.token_start, min(source.token_end, num_tokens)
    if start >= end:
        return None
    own = client.get_context_text(context, start, end)
    around = client.get_context_text(context, max(0, start - MARGIN), min(num_tokens, end + MARGIN))
    return Excerpt(own, *_parts(own, around))


class SourceList:
    """Prints where an answer about a context comes from."""

    def __init__(self, client: Client, context: str) -> None:
        self._client = client
        self._context = context
        self._console = Console(highlight=False, soft_wrap=True)

    def print(self, finished: Finished) -> None:
        """Under the answer that has ended, if it tells."""
        attribution = finished.attribution
        if attribution is None:
            return
        num_tokens = self._client.get_context(self._context).tokens
        for source in joined(attribution.sources):
            self._console.print(self._told(source, num_tokens))
        message = f"{attribution.context_share:.1%} on the context, {attribution.prompt_share:.1%} on the prompt, "
        message += f"{attribution.answer_share:.1%} on the answer, {attribution.sink_share:.1%} on sinks"
        self._console.print(Text(f"[attention: {message}]", style="dim"))

    def _told(self, source: Source, num_tokens: int) -> Text:
        found = excerpt(self._client, self._context, source, num_tokens)
        if found is None:
            return Text(f"{_place(source, None)}  {_numbers(source)}")
        reported = Text(f"{_place(source, found.own)}  {_numbers(source)}\n", style="cyan")
        body = Text()
        for part, style in found.parts:
            body.append(part.translate(CONTROLS), style)
        for line in body.split("\n", allow_blank=True):
            reported.append("    ")
            reported.append_text(line)
            reported.append("\n")
        return reported


def _place(source: Source, text: ContextText | None) -> str:
    """The file and the line, if they are known."""
    if text is not None and text.file and text.line is not None:
        return f"{text.file.translate(CONTROLS)}:{text.line}"
    return f"tokens {source.token_start:,}-{source.token_end:,}"


def _numbers(source: Source) -> str:
    return f"{source.share:.1%}" + (f", {round(source.drop, 2) + 0.0:+.2f} nats" if source.drop is not None else "")


def _parts(own: ContextText, around: ContextText) -> tuple[str, str, str]:
    """What is before a text, the text, and what is behind it."""
    if None not in (own.byte_start, own.byte_end, around.byte_start, around.byte_end):
        first, all_bytes = (own.byte_start or 0) - (around.byte_start or 0), around.text.encode()
        last = first + len(own.text.encode())
        if all_bytes[first:last].decode(errors="replace") == own.text:
            return all_bytes[:first].decode(), own.text, all_bytes[last:].decode()
    if own.text in around.text:
        before, _, behind = around.text.partition(own.text)
        return before, own.text, behind
    return "", own.text, ""
