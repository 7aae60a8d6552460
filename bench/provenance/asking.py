"""One question with its sources, and whether these are where its fact stands."""

from collections.abc import Iterable, Sequence

import msgspec

from bench.needle.documents import Question
from longleaf.client import Client
from longleaf.types import Delta, Event, Finished, Provenance, Ranking, Source

MAX_TOKENS = 96
LINE_TOKENS = 32
"""Most tokens of an answer of one line."""
MOST_SPANS = 64
"""Most spans that the service reports. A document of up to 4,096 tokens has no more."""


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
    has_largest_drop: bool | None
    """The source with the largest drop among the returned ones contains the fact. None if they were not confirmed."""
    share: float
    """The share of the first source."""
    drop: float
    """The largest, in nats."""


def ask(
    client: Client, context: str, question: Question, place: Place | None, tokens: int, method: Ranking
) -> Attributed:
    """Asks with sources, which are confirmed."""
    wanted = Provenance(ranking=method, confirm=True)
    answer, sources, _ = _answer(client.ask(context, question.text, max_tokens=MAX_TOKENS, provenance=wanted))
    return judged(question, answer, sources, place, tokens, method)


def ask_by_line(
    client: Client, context: str, question: Question, place: Place | None, tokens: int
) -> tuple[Attributed, Attributed]:
    """Asks once for an answer of one line: its sources by contrast, and raw. They are not confirmed."""
    wanted = Provenance(num_spans=MOST_SPANS, per_token=True)
    events = client.ask(context, question.text, max_tokens=LINE_TOKENS, stop=["\n"], provenance=wanted)
    answer, sources, raw = _answer(events)
    by_contrast = judged(question, answer, sources, place, tokens, "contrast")
    return by_contrast, judged(question, answer, raw, place, tokens, "raw")


def _answer(events: Iterable[Event]) -> tuple[str, Sequence[Source], Sequence[Source]]:
    """The answer, its sources, and the sources of its Deltas by their summed shares."""
    text, sources, sums = "", tuple[Source, ...](), dict[int, Source]()
    for event in events:
        match event:
            case Delta():
                text += event.text
                for source in event.attribution.sources if event.attribution else ():
                    before = sums.get(source.token_start)
                    share = source.share * len(event.token_ids) + (before.share if before else 0.0)
                    sums[source.token_start] = msgspec.structs.replace(source, share=share)
            case Finished() if event.attribution is not None:
                sources = event.attribution.sources
            case _:
                pass
    return text, sources, sorted(sums.values(), key=lambda source: -source.share)


def judged(
    question: Question, answer: str, sources: Sequence[Source], place: Place | None, tokens: int, method: Ranking
) -> Attributed:
    """Compares the sources of an answer with the place of the fact."""
    meets = [place is not None and place.meets(source) for source in sources]
    drops = [source.drop or 0.0 for source in sources]
    is_unconfirmed = any(source.drop is None for source in sources)
    return Attributed(
        task=question.task,
        tokens=tokens,
        method=method,
        is_right=question.is_answered(answer),
        rank=meets.index(True) if any(meets) else None,
        has_largest_drop=None if is_unconfirmed else bool(drops) and meets[drops.index(max(drops))],
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
