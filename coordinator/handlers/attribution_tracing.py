"""Attribution of answers while they are generated, and its confirmation afterwards.

Confirmation uses probes: prompts that are read and generate nothing. Probes are scheduled like other prompts, but retry
when the engine is busy, because the answer has already been sent.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from math import fsum, isfinite
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from coordinator import engine_messages
from coordinator.handlers.attribution import (
    AttentionAccumulator,
    AttentionTotals,
    SpanTable,
    attribution,
    spans_of,
    top,
)
from coordinator.handlers.attribution_baseline import NUM_ROWS, Baselines
from coordinator.text.text_map import TextMap
from longleaf.errors import InvalidArgument, NotFinite, ResourceExhausted, Unavailable
from longleaf.rank_protocol.step import Attention
from longleaf.runs import union
from longleaf.sampling import SamplingParams
from longleaf.types import Attribution, Finished, Generate, Provenance, TokenRange

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine
    from coordinator.engine.stream import Stream

MAX_AT_ONCE = 8
"""Most concurrent probes."""
MAX_SCORED_AT_ONCE = 1024
"""Most scored tokens of concurrent probes: each needs one number per token of the vocabulary."""
SCORING = SamplingParams(max_tokens=1)

TextMaps = Callable[[str], TextMap | None]
"""Returns the text of a context by id, if known."""


def no_text(_: str) -> TextMap | None:
    """For contexts without a known text."""
    return None


class AttributionTracer:
    """Attribution of the answers of one request."""

    def __init__(self, request: Generate, provenance: Provenance, baselines: Baselines) -> None:
        """Raises InvalidArgument if the request names no context."""
        if request.context is None:
            raise InvalidArgument("provenance", "needs a context, and the request names none")
        self._context = request.context
        self._provenance = provenance
        self._baselines = baselines
        self._reported = [AttentionTotals() for _ in range(request.num_samples)]
        self._num_open = 0
        """Samples that have not ended."""
        self._engine: Engine | None = None
        self._spans: SpanTable | None = None
        self._text: TextMap | None = None
        self._hidden = request.hidden
        self._scheduling = engine_messages.DEFAULT_SCHEDULING
        self._token_ids: Sequence[int] = ()
        """Tokens of the prompt, if it must be read again."""
        self._room = 0
        """Number of tokens that fit after the context."""
        self._charge: Callable[[int], None] = lambda _: None

    def begin(
        self, engine: "Engine", prompt: engine_messages.Prompt, texts: TextMaps, charge: Callable[[int], None]
    ) -> engine_messages.Prompt:
        """Returns the prompt to submit. `charge` is called with the tokens of each probe. Raises InvalidArgument or
        NotFound."""
        self._engine, self._charge = engine, charge
        self._spans = spans_of(self._provenance, engine.attribution_context(self._context))
        if self._provenance.confirm and self._spans.context.has_states:
            raise InvalidArgument("provenance.confirm", engine_messages.STATES_HIDE_NOTHING)
        self._text = texts(self._context)
        room = engine.answer_room(self._context, 0, 1, is_whole=prompt.is_whole)
        self._room = max(room, len(prompt.token_ids) + prompt.sampling.max_tokens)
        if self._provenance.confirm:
            self._token_ids = prompt.token_ids
        self._scheduling, self._num_open = prompt.scheduling, prompt.num_open
        attribution_context = self._spans.context
        return replace(prompt, cuts=self._spans.cuts, beginning=attribution_context.cut(attribution_context.end))

    def reported(self, sample: int) -> AttentionTotals:
        """The totals of a sample."""
        return self._reported[sample]

    def of_delta(self, attention: Sequence[Attention]) -> Attribution | None:
        """Sources of the tokens of a Delta, if requested."""
        if not self._provenance.per_token or self._spans is None or not attention:
            return None
        sums = AttentionAccumulator()
        for each in attention:
            sums.add(each)
        return attribution(sums, self._spans, top(sums.shares, self._provenance.num_spans), text=self._text)

    async def finished(self, finished: Finished) -> Finished:
        """Adds the attribution to the end of an answer. Raises the errors of probes that fail."""
        self._num_open -= 1
        totals = self._reported[finished.sample]
        if self._spans is None or not totals.sums.num_tokens:
            return replace(finished, attribution=Attribution())
        provenance, shares = self._provenance, totals.sums.shares
        contrast = shares - await self._baseline(self._spans) if provenance.ranking == "contrast" else None
        chosen, drops = top(shares if contrast is None else contrast, provenance.num_spans), None
        if provenance.confirm and chosen:
            drops = dict(zip(chosen, await self._drops(totals.token_ids, chosen), strict=True))
        found = attribution(totals.sums, self._spans, chosen, contrast=contrast, drops=drops, text=self._text)
        return replace(finished, attribution=found)

    async def _baseline(self, spans: SpanTable) -> NDArray[np.float32]:
        """The shares of the context's spans for a neutral question, which is read after the context."""
        context, hidden = spans.context, self._hidden
        if not hidden and (stored := self._baselines.get(context, spans.cuts)) is not None:
            return stored
        token_ids = await self._baselines.token_ids()
        fitting = token_ids[: self._room]
        probe = self._probe(fitting, context.end)
        num_reported = min(len(fitting), NUM_ROWS)
        [found] = await self._run([replace(probe, cuts=spans.cuts, hidden=hidden, num_reported=num_reported)])
        assert found.attention is not None, "ranks report the attention of a probe with spans"
        sums = AttentionAccumulator()
        sums.add(found.attention)
        shares = sums.shares.astype(np.float32)
        if not hidden and len(fitting) == len(token_ids):
            self._baselines.put(context, spans.cuts, shares)
        return shares

    async def _drops(self, answer: "array[int]", chosen: Sequence[int]) -> list[float]:
        """Decrease of the log probability of the answer, in nats, with each of the spans hidden."""
        assert self._spans is not None
        token_ids = array("I", self._token_ids) + answer
        given = self._probe(token_ids, self._spans.context.end)
        given = replace(given, hidden=self._hidden, num_scored=len(answer))
        hidden = [_with(self._hidden, self._spans.bounds[span]) for span in chosen]
        as_given, *others = await self._run([given, *(replace(given, hidden=ranges) for ranges in hidden)])
        return [fsum(as_given.scores) - fsum(other.scores) for other in others]

    def _probe(self, token_ids: Sequence[int], end: int) -> engine_messages.Prompt:
        """A probe that reads `token_ids` after `end` tokens of the context. While samples of the request are running,
        the tenant's limit of concurrent generations does not apply: the samples occupy it until they are read, so the
        probe could wait forever."""
        assert self._spans is not None
        scheduling = replace(self._scheduling, max_concurrent=None) if self._num_open else self._scheduling
        return engine_messages.Prompt(
            context=self._context,
            token_ids=token_ids,
            sampling=SCORING,
            scheduling=scheduling,
            beginning=self._spans.context.cut(end),
            is_probe=True,
        )

    async def _run(self, probes: Sequence[engine_messages.Prompt]) -> list[engine_messages.ProbeResult]:
        """Runs the probes, concurrently as far as memory allows."""
        most = max(1, min(MAX_AT_ONCE, MAX_SCORED_AT_ONCE // max(1, probes[0].num_scored)))
        found = list[engine_messages.ProbeResult]()
        for first in range(0, len(probes), most):
            async with AsyncExitStack() as stack:
                streams = list["Stream"]()
                for probe in probes[first : first + most]:
                    streams.append(await stack.enter_async_context(aclosing(await self._submit(probe))))
                found += [await _found(stream) for stream in streams]
        return found

    async def _submit(self, probe: engine_messages.Prompt) -> "Stream":
        """Submits a probe; waits while the engine rejects new requests."""
        assert self._engine is not None
        stream = await submit_patiently(self._engine, probe)
        self._charge(len(probe.token_ids))
        return stream


async def submit_patiently(engine: "Engine", prompt: engine_messages.Prompt) -> "Stream":
    """Submits a prompt that belongs to an admitted request; retries while the engine is busy."""
    while True:
        try:
            return engine.submit(prompt)
        except (ResourceExhausted, Unavailable) as error:
            if error.retry_seconds is None:
                raise
            await asyncio.sleep(error.retry_seconds)


async def _found(stream: "Stream") -> engine_messages.ProbeResult:
    async for event in stream:
        if isinstance(event, engine_messages.Ended) and event.found is not None:
            if not all(map(isfinite, event.found.scores)):
                raise NotFinite("the answer")
            return event.found
    raise Unavailable("the engine ended the stream before a source was confirmed")


def _with(hidden: Sequence[TokenRange], span: TokenRange) -> tuple[TokenRange, ...]:
    return tuple(union([*hidden, span]))
