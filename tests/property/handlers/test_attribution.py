"""Exactly the delivered tokens of an answer are counted, for any order of events and any stop; sums of arbitrary shares
are ranked correctly.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator import engine_messages
from coordinator.handlers.attribution import AttentionAccumulator, attribution, spans_of, top
from coordinator.handlers.attribution_baseline import Baselines
from coordinator.handlers.attribution_tracing import AttributionTracer
from coordinator.handlers.response_assembler import ResponseAssembler
from coordinator.text.detokenizer import Alphabet
from longleaf.errors import InvalidArgument
from longleaf.rank_protocol.step import MAX_ATTRIBUTED_SPANS, NUM_OTHER_SHARES, Attention
from longleaf.sampling import SamplingParams, Token
from longleaf.types import Delta, Finished, Generate, Provenance
from tests.support.fakes.echo_model import echo_attention, echo_spans
from tests.support.service import byte_tokenizer

SPANS = echo_spans((0, 40), 90, 32)
CONTEXT = engine_messages.AttributionContext(
    segments=(1, 2), ends=(40, 90), num_opening=4, owner=None, block_size=64, full_layers=(3,)
)
LETTERS = "abc"
BYTES = byte_tokenizer()
IDS = BYTES.encode(LETTERS).ids


def alphabet() -> Alphabet:
    return Alphabet(decode=lambda ids: BYTES.decode(list(ids)))


def attention_of(sample: int, index: int) -> Attention:
    return echo_attention(SPANS, (), 100 * sample + index)


@st.composite
def tellings(draw: st.DrawFn) -> tuple[list[list[int]], list[engine_messages.Event]]:
    """Tokens of some samples, and the events in which they come: in any pieces, one among the other's."""
    samples = draw(st.lists(st.lists(st.sampled_from(IDS), min_size=1, max_size=12), min_size=1, max_size=3))
    at, found = [0] * len(samples), list[engine_messages.Event]()
    while any(start < len(ids) for start, ids in zip(at, samples, strict=True)):
        sample = draw(st.sampled_from([i for i, ids in enumerate(samples) if at[i] < len(ids)]))
        start = at[sample]
        at[sample] = end = min(len(samples[sample]), start + draw(st.integers(1, 4)))
        tokens = tuple(Token(token_id) for token_id in samples[sample][start:end])
        found.append(
            engine_messages.Tokens(start, tokens, sample, tuple(attention_of(sample, i) for i in range(start, end)))
        )
    found += [engine_messages.Ended("length", 0, 0, len(ids), 0.0, 0.0, 0.0, i) for i, ids in enumerate(samples)]
    return samples, found


@given(tellings(), st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=3), st.integers(0, 6))
@settings(deadline=None)
def test_exactly_the_delivered_tokens_are_counted(
    reporting: tuple[list[list[int]], list[engine_messages.Event]], stops: list[str], num_before: int
) -> None:
    """For the first `num_before` events another service has kept only the tokens."""
    samples, output = reporting
    sampling = SamplingParams(max_tokens=20, stop=tuple(stops))
    request = Generate(input="", context="doc", sampling=sampling, num_samples=len(samples), provenance=Provenance())
    tracing = AttributionTracer(request, Provenance(), Baselines())
    answer = ResponseAssembler("", request, alphabet(), frozenset(), lambda: 0.0, True, tracing)
    deltas, ends, retained = list[Delta](), list[Finished](), dict[tuple[int, int], bool]()
    for number, event in enumerate(output):
        if isinstance(event, engine_messages.Tokens):
            retained |= {(event.sample, event.index + i): number >= num_before for i in range(len(event.tokens))}
            event = event if number >= num_before else engine_messages.Tokens(event.index, event.tokens, event.sample)
        for message in answer.assemble(event):
            deltas += [message] if isinstance(message, Delta) else []
            ends += [message] if isinstance(message, Finished) else []
    assert sorted(end.sample for end in ends) == list(range(len(samples)))
    for sample in range(len(samples)):
        ids = [i for delta in deltas if delta.sample == sample for i in delta.token_ids]
        counted = [attention_of(sample, index) for index in range(len(ids)) if retained[sample, index]]
        found = tracing.reported(sample)
        assert list(found.token_ids) == ids == samples[sample][: len(ids)]
        assert found.sums.num_tokens == len(counted)
        if counted:
            means = np.mean([np.frombuffer(each.means, np.float32) for each in counted], axis=0)
            np.testing.assert_allclose(found.sums.shares, means[:-NUM_OTHER_SHARES], rtol=1e-6)
            np.testing.assert_allclose(found.sums.others, means[-NUM_OTHER_SHARES:], rtol=1e-6)


MEANS = st.lists(st.integers(0, 9), min_size=7, max_size=7)


@given(st.lists(st.tuples(MEANS, MEANS, st.lists(st.integers(0, 5), min_size=6, max_size=6)), min_size=1, max_size=5))
def test_the_largest_is_that_of_any_token_with_its_head(tellings: list[tuple[list[int], list[int], list[int]]]) -> None:
    sums = AttentionAccumulator()
    for means, largest, heads in tellings:
        numbers = np.array(means, np.float32) / max(1, sum(means))
        tops, numbered = np.array(largest[:3], np.float32), np.array(heads[:3], np.int32) + (7 << 16)
        sums.add(Attention(numbers.tobytes(), tops.tobytes(), numbered.tobytes()))
    for span in range(3):
        share, layer, head = sums.largest(span)
        assert share == max(largest[span] for _, largest, _ in tellings)
        first = next(heads[span] for _, largest, heads in tellings if largest[span] == share)
        assert (layer, head) == (7, first)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.integers(0, 22))
def test_the_largest_positive_values_are_chosen(values: list[float], count: int) -> None:
    found = top(np.array(values), count)
    ranked = sorted((i for i, value in enumerate(values) if value > 0), key=lambda i: (-values[i], i))
    assert found == ranked[:count]


def test_spans_restart_at_each_segment() -> None:
    spans = spans_of(Provenance(span_tokens=32), CONTEXT)
    assert list(spans.bounds) == [(4, 32), (32, 40), (40, 72), (72, 90)]
    assert spans_of(Provenance(), CONTEXT).cuts.size == 64
    opening = spans_of(Provenance(span_tokens=32), replace(CONTEXT, num_opening=50))
    assert list(opening.bounds) == [(50, 50), (50, 50), (50, 72), (72, 90)]
    assert CONTEXT.cut(40) == engine_messages.ContinuationPoint((1,), 40)
    assert CONTEXT.cut(41) == engine_messages.ContinuationPoint((1, 2), 41)
    assert attribution(AttentionAccumulator(), spans, []).num_tokens == 0


@pytest.mark.parametrize("ends", [(32 * MAX_ATTRIBUTED_SPANS + 1,), range(1, MAX_ATTRIBUTED_SPANS + 2)])
def test_too_many_spans_are_refused(ends: Sequence[int]) -> None:
    """Too many because of their length, or of documents that are shorter."""
    attribution_context = replace(CONTEXT, segments=tuple(ends), ends=tuple(ends))
    with pytest.raises(InvalidArgument, match="524,289 spans of 32 tokens; the limit is 524,288") as caught:
        spans_of(Provenance(span_tokens=32), attribution_context)
    assert caught.value.field == "provenance.span_token_count"
