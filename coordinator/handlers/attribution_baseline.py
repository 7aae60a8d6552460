"""Baselines of contexts: the attention that each span of a context gets for a neutral question.

Some spans attract attention for every question. The baseline measures that, and the ranking by contrast subtracts it.
It depends only on the context, and segments never change. So a baseline is computed once, with the first answer that
needs it, and stored in memory for as long as the last segment of the context exists: a fork shares the baseline of its
source, an appended document has a new one, and the baseline goes with the last context that ends in the segment.
"""

from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from coordinator.engine_messages import AttributionContext, SpanLayout

NEUTRAL_QUESTION = "Summarize the text."
NUM_ROWS = 8
"""Number of tokens, at the end of the neutral question in its template, whose mean attention is the baseline. Earlier
tokens attend to the end of the context because it is near; the rows of an answer do so less."""
MAX_PER_SEGMENT = 4
"""Maximum number of baselines per segment: for different ends, span sizes and layers. The oldest one is dropped."""

Shares = NDArray[np.float32]
Question = Callable[[], Awaitable[Sequence[int]]]
"""Returns the token ids of the neutral question."""


async def no_question() -> Sequence[int]:
    """For contexts without a tokenizer."""
    return (0,)


class Baselines:
    """The baselines of all contexts, and the neutral question that they are measured with."""

    def __init__(self, question: Question = no_question) -> None:
        """`question` is called once."""
        self._question = question
        self._token_ids = array("I")
        self._found = WeakKeyDictionary[object, OrderedDict[tuple[int, SpanLayout], Shares]]()

    async def token_ids(self) -> Sequence[int]:
        """The token ids of the neutral question."""
        if not self._token_ids:
            self._token_ids = array("I", await self._question())
        return self._token_ids

    def get(self, context: AttributionContext, layout: SpanLayout) -> Shares | None:
        """The baseline of a context, if it is stored."""
        stored = self._found.get(context.owner)
        return None if stored is None else stored.get((context.end, layout))

    def put(self, context: AttributionContext, layout: SpanLayout, shares: Shares) -> None:
        """Stores the baseline of a context."""
        stored = self._found.setdefault(context.owner, OrderedDict())
        stored[context.end, layout] = shares
        while len(stored) > MAX_PER_SEGMENT:
            stored.popitem(last=False)
