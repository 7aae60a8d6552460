"""One question with its sources, and whether these are where its fact stands."""

from collections.abc import Sequence
from typing import Unpack

import msgspec

from bench.needle.documents import Question
from longleaf.client import Client
from longleaf.types import Delta, Finished, GenerateOptions, Provenance, Ranking, Source

MAX_TOKENS = 96


class Place(msgspec.Struct, frozen=True):
    """Tokens [start, end) of the context in which a fact stands, from its sentence's first to its value's last."""

    start: int
    end: int

    def meets(self, source: Source) -> bool:
        return source.token_start < self.end and self.start < source.token_end


class Attributed(msgspec.Struct, frozen=True):
    """The results of one question."""

    task: str
    tokens: int
    """Wanted length of the document."""
    method: Ranking
    is_right: bool
    rank: int | None
    """Rank of the first source that contains the fact, from 0; None: no returned source contains it."""
    has_largest_drop: bool
    """The source with the largest drop among the returned ones contains the fact."""
    share: float
    """The share of the first source."""
    drop: float
    """The largest, in nats."""


def ask(
    client: Client,
    context: str,
    question: Question,
    place: Place | None,
    tokens: int,
    method: Ranking,
    wanted: Provenance | None = None,
    **limits: Unpack[GenerateOptions],
) -> Attributed:
    """Asks with sources: as `wanted`, by default confirmed ones. `limits` are those of the answer."""
    options = GenerateOptions(max_tokens=MAX_TOKENS, provenance=wanted or Provenance(ranking=method, confirm=True))
    events = list(client.ask(context, question.text, **(options | limits)))
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.attribution is not None
    answer = "".join(event.text for event in events if isinstance(event, Delta))
    return judged(question, answer, last.attribution.sources, place, tokens, method)


def judged(
    question: Question, answer: str, sources: Sequence[Source], place: Place | None, tokens: int, method: Ranking
) -> Attributed:
    """Compares the sources of an answer with the place of the fact."""
    meets = [place is not None and place.meets(source) for source in sources]
    drops = [source.drop or 0.0 for source in sources]
    return Attributed(
        task=question.task,
        tokens=tokens,
        method=method,
        is_right=question.is_answered(answer),
        rank=meets.index(True) if any(meets) else None,
        has_largest_drop=bool(drops) and meets[drops.index(max(drops))],
        share=sources[0].share if sources else 0.0,
        drop=max(drops, default=0.0),
    )


def place_of(client: Client, context: str, text: str, question: Question) -> Place | None:
    """Where the fact of a question stands; None for one that stands nowhere."""
    if question.depth is None:
        return None
    start = round(question.depth * len(text))
    end = text.index(question.values[0], start) + len(question.values[0])
    low, high = (len(text[:place].encode()) for place in (start, end))
    found = client.get_context_text(context, byte_start=low, byte_end=high)
    return Place(found.token_start, found.token_end)
