"""Options and output of `longleaf ask --sources`: the spans of the context that an answer attended to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from rich.console import Console
from rich.text import Text

from longleaf.citation import cite, joined
from longleaf.cli.options import option
from longleaf.errors import InvalidArgument
from longleaf.types import Attribution, ContextText, Finished, GenerateOptions, Provenance, Source

if TYPE_CHECKING:
    from longleaf.client import Client

SOURCES = "Sources"
MARGIN = 24
"""Tokens shown before and after a source."""
CONTROLS = {code: "\ufffd" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
"""Control characters, with their replacement for `str.translate`."""


SHARES = "share of attention"
CONTRAST = ", ranked by its excess over that for a neutral question"
NATS = "; nats: how much less likely the answer is without it (2.3: ten times)"


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """The parsed options."""

    sources: Annotated[
        bool, option(SOURCES, "Print the spans of the context that the answer attended to most.", "--sources")
    ] = False
    source_count: Annotated[int, option(SOURCES, "Number of spans to print, 1 to 64.")] = 8
    confirm: Annotated[
        bool,
        option(SOURCES, "Measure how much less likely the answer is without each source, in nats.", "--confirm"),
    ] = False
    raw: Annotated[
        bool,
        option(
            SOURCES,
            "Rank the spans by their attention, without comparing it with that for a neutral question.",
            "--raw",
        ),
    ] = False
    hide: Annotated[
        list[str] | None,
        option(
            SOURCES,
            "Hide tokens A to B - 1 of the context from the question and the answer; may be repeated.",
            default=False,
            metavar="A-B",
        ),
    ] = None

    def options(self) -> GenerateOptions:
        """Options for the client. Raises InvalidArgument."""
        for name, is_given in (("--confirm", self.confirm), ("--raw", self.raw)):
            if is_given and not self.sources:
                raise InvalidArgument(name, "needs --sources")
        options = GenerateOptions(hidden=sorted(map(_range, self.hide or ())))
        if self.sources:
            ranking = "raw" if self.raw else "contrast"
            options["provenance"] = Provenance(num_spans=self.source_count, ranking=ranking, confirm=self.confirm)
        return options


def _range(typed: str) -> tuple[int, int]:
    start, _, end = typed.partition("-")
    if not (start.isdecimal() and end.isdecimal()):
        raise InvalidArgument("--hide", f"{typed!r} is not A-B with two integers")
    return int(start), int(end)


class Excerpt(NamedTuple):
    """The text of a source, its position, and the surrounding text."""

    own: ContextText
    before: str
    text: str
    behind: str

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The three parts in order, each with its style."""
        return (self.before, "dim"), (self.text, "bold"), (self.behind, "dim")


def excerpt(client: "Client", context: str, source: Source, num_tokens: int) -> Excerpt | None:
    """The text of a source in a context of `num_tokens` tokens; None if a replaced context is shorter."""
    start, end = source.token_start, min(source.token_end, num_tokens)
    if start >= end:
        return None
    own = client.get_context_text(context, start, end)
    around = client.get_context_text(context, max(0, start - MARGIN), min(num_tokens, end + MARGIN))
    return Excerpt(own, *_parts(own, around))


class SourceList:
    """Prints the sources of answers about a context, and explains their numbers once."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._console = Console(highlight=False, soft_wrap=True)
        self._explained = ""

    def print(self, context: str, finished: Finished) -> None:
        """Prints the sources of a finished answer about a context, if they were requested."""
        attribution = finished.attribution
        if attribution is None:
            return
        num_tokens = self._client.get_context(context).tokens
        for number, source in enumerate(joined(attribution.sources), 1):
            self._console.print(self._source_text(number, context, source, num_tokens))
        self._console.print(Text(f"[attention: {_format_shares(attribution)}]", style="dim"))
        legend = _legend(attribution.sources)
        if attribution.sources and legend != self._explained:
            self._console.print(Text(f"[percent: {legend}]", style="dim"))
            self._explained = legend

    def _source_text(self, number: int, context: str, source: Source, num_tokens: int) -> Text:
        found = excerpt(self._client, context, source, num_tokens)
        citation = cite(source, found.own if found is not None else None)
        head = f"[{number}] {citation.label.translate(CONTROLS)}  {_numbers(source)}"
        if found is None:
            return Text(head)
        text = Text(f"{head}\n", style="cyan")
        body = Text()
        for part, style in found.parts:
            body.append(part.translate(CONTROLS), style)
        for line in body.split("\n", allow_blank=True):
            text.append("    ")
            text.append_text(line)
            text.append("\n")
        return text


def _format_shares(attribution: Attribution) -> str:
    """The shares of an answer's attention, except for learned sinks of models that have none."""
    shares = [
        (attribution.context_share, "the context"),
        (attribution.opening_share, "its first tokens"),
        (attribution.prompt_share, "the prompt"),
        (attribution.answer_share, "the answer"),
    ]
    if attribution.sink_share:
        shares.append((attribution.sink_share, "learned sinks"))
    return ", ".join(f"{share:.1%} on {name}" for share, name in shares)


def _legend(sources: Sequence[Source]) -> str:
    """The meaning of the numbers of sources."""
    order = CONTRAST if any(source.contrast is not None for source in sources) else ""
    return SHARES + order + (NATS if any(source.drop is not None for source in sources) else "")


def _numbers(source: Source) -> str:
    return f"{source.share:.1%}" + (f", {round(source.drop, 2) + 0.0:+.2f} nats" if source.drop is not None else "")


def _parts(own: ContextText, around: ContextText) -> tuple[str, str, str]:
    """The text before a source, the source, and the text after it."""
    if None not in (own.byte_start, own.byte_end, around.byte_start, around.byte_end):
        first, all_bytes = (own.byte_start or 0) - (around.byte_start or 0), around.text.encode()
        last = first + len(own.text.encode())
        if all_bytes[first:last].decode(errors="replace") == own.text:
            return all_bytes[:first].decode(), own.text, all_bytes[last:].decode()
    if own.text in around.text:
        before, _, behind = around.text.partition(own.text)
        if own.byte_start is not None and around.byte_start is not None:
            # without the chat template before the document, whose tokens have a text, but no bytes of it
            bytes_before, num_bytes = before.encode(), own.byte_start - around.byte_start
            before = bytes_before[max(0, len(bytes_before) - num_bytes) :].decode(errors="ignore")
        return before, own.text, behind
    return "", own.text, ""
