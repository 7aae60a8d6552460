"""Attribution of answers over real sockets, on ranks whose attention is computed by arithmetic."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.engine.engine import Engine
from coordinator.handlers.attribution_baseline import NEUTRAL_QUESTION, NUM_ROWS
from longleaf.client import AsyncClient
from longleaf.credentials import Quotas
from longleaf.errors import InvalidArgument, NotFound
from longleaf.positions import AttentionSpan, WindowSpec
from longleaf.rank_protocol.step import NUM_OTHER_SHARES, Decode, Prefill, Row, Spans
from longleaf.runs import union
from longleaf.types import Attribution, Delta, Event, Finished, Provenance, Source, Started
from tests.support import gated
from tests.support.fakes.echo_model import echo_attention, echo_scores, echo_spans
from tests.support.fakes.ranks import FakeRanks
from tests.support.service import byte_tokenizer
from tests.support.tenants import ACME, credential_of, credentials

pytestmark = pytest.mark.timeout(60)

STARTS, END, SIZE = (0, 200), 250, 32
"""Positions of the context's documents; no document is a whole number of spans."""
SPANS = [(max(4, start), end) for start, end in echo_spans(STARTS, END, SIZE)]
"""The first 4 tokens belong to no span."""
QUESTION = (7, 8, 9)
PROVENANCE = Provenance(span_tokens=SIZE, num_spans=64, ranking="raw")


class Service:
    """A service with a context of two documents."""

    def __init__(self, engine: Engine, ranks: FakeRanks, client: AsyncClient) -> None:
        self.engine, self.ranks, self.client = engine, ranks, client

    async def ask(self, provenance: Provenance | None = PROVENANCE, **options: Any) -> list[Event]:
        options = {"context": "moby", "provenance": provenance} | options
        return [event async for event in self.client.generate(QUESTION, **options)]

    @property
    def rows(self) -> list[Row]:
        works = [plan.work for plan in self.ranks.plans]
        return [row for work in works if isinstance(work, Decode) for row in work.rows]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncGenerator[Service, None]:
    ranks = FakeRanks(2, 400, vocab=128)
    settings: dict[str, Any] = {"chunk_size": 64, "replicate_below": 16, "world_size": 2, "block_size": 64}
    async with (
        gated.serving(ranks, tmp_path / "model", **settings) as (engine, address),
        AsyncClient(address) as client,
    ):
        await client.ingest("moby", [1 + i % 100 for i in range(STARTS[1])])
        await client.ingest("moby", [1 + i % 90 for i in range(END - STARTS[1])], append=True)
        yield Service(engine, ranks, client)


def finished(events: Sequence[Event], sample: int = 0) -> Finished:
    [found] = [event for event in events if isinstance(event, Finished) and event.sample == sample]
    return found


def answer(events: Sequence[Event], sample: int = 0) -> list[int]:
    return [i for event in events if isinstance(event, Delta) and event.sample == sample for i in event.token_ids]


def attribution(event: Finished | Delta) -> Attribution:
    assert event.attribution is not None
    return event.attribution


def mean(first: int, count: int, hidden: Sequence[tuple[int, int]] = ()) -> np.ndarray[Any, Any]:
    """The mean attribution of an answer's tokens from `first` on."""
    position = END + len(QUESTION) - 1 + first
    reported = [echo_attention(SPANS, hidden, position + i) for i in range(count)]
    return np.mean([np.frombuffer(each.means, np.float32) for each in reported], axis=0)


def shares(sources: Sequence[Source]) -> dict[tuple[int, int], float]:
    return {(source.token_start, source.token_end): source.share for source in sources}


def check_attribution(found: Attribution, expected: np.ndarray[Any, Any]) -> None:
    spans = zip(SPANS, expected[:-NUM_OTHER_SHARES], strict=True)
    assert shares(found.sources) == pytest.approx({span: share for span, share in spans if share}, abs=1e-6)
    others = (found.prompt_share, found.answer_share, found.sink_share, found.opening_share)
    assert others == pytest.approx(tuple(expected[-NUM_OTHER_SHARES:]), abs=1e-6)
    assert found.context_share + sum(others) == pytest.approx(1.0, abs=1e-5)


async def test_answer_reports_the_sources_of_its_tokens(service: Service) -> None:
    events = await service.ask(max_tokens=9)
    found = attribution(finished(events))
    assert found.num_tokens == 9
    check_attribution(found, mean(0, 9))
    ranked = [source.share for source in found.sources]
    assert ranked == sorted(ranked, reverse=True)
    assert all(source.contrast is None and source.drop is None for source in found.sources)
    assert {source.largest_layer for source in found.sources} == {3}
    largest = max(np.frombuffer(echo_attention(SPANS, (), END + 2 + i).largest, np.float32)[0] for i in range(9))
    assert next(s for s in found.sources if s.token_start == 4).largest_share == pytest.approx(largest)
    assert {event.attribution for event in events if isinstance(event, Delta)} == {None}
    requested = [row.spans for row in service.rows if row.spans is not None]
    assert requested == [Spans(SIZE, 2, END + len(QUESTION), num_lead=4)]


async def test_attribution_is_neither_computed_nor_sent_unless_requested(service: Service) -> None:
    events = await service.ask(None, max_tokens=3)
    assert finished(events).attribution is None
    assert not any(row.spans or row.hidden or row.num_scored for row in service.rows)


async def test_each_delta_reports_its_own_tokens(service: Service) -> None:
    each = Provenance(span_tokens=SIZE, num_spans=64, per_token=True, ranking="raw")
    events = await service.ask(each, max_tokens=5)
    at = 0
    for delta in (event for event in events if isinstance(event, Delta)):
        check_attribution(attribution(delta), mean(at, len(delta.token_ids)))
        at += len(delta.token_ids)
    assert at == 5


async def test_tokens_after_a_stop_string_are_not_counted(service: Service) -> None:
    text = "".join(event.text for event in await service.ask(max_tokens=30) if isinstance(event, Delta))
    events = await service.ask(max_tokens=30, stop=[text[3:5]])
    end = finished(events)
    assert end.reason == "stop"
    count = len(answer(events))
    assert count < 30
    assert attribution(end).num_tokens == count
    check_attribution(attribution(end), mean(0, count))


async def test_each_sample_reports_its_own_sources(service: Service) -> None:
    events = await service.ask(max_tokens=6, num_samples=3)
    for sample in range(3):
        assert attribution(finished(events, sample)).num_tokens == len(answer(events, sample)) == 6
        check_attribution(attribution(finished(events, sample)), mean(0, 6))


async def test_hidden_sources_reach_the_ranks_and_the_answer_is_not_exact(service: Service) -> None:
    hidden = [(32, 96), (150, 151)]
    events = await service.ask(max_tokens=4, hidden=hidden)
    assert [event.is_exact for event in events if isinstance(event, Started | Finished)] == [False] * 2
    check_attribution(attribution(finished(events)), mean(0, 4, hidden))
    long = [5] * 40
    plain = [event async for event in service.client.generate(long, context="moby", hidden=hidden, max_tokens=1)]
    assert not finished(plain).is_exact
    assert finished(plain).exactness_note == "tokens of the context are hidden"
    assert finished(plain).attribution is None
    chunks = [plan.work for plan in service.ranks.plans if isinstance(plan.work, Prefill)]
    assert [chunk.hidden for chunk in chunks if chunk.start >= END] == [tuple(hidden)]
    assert finished(await service.ask(max_tokens=1)).is_exact


@pytest.mark.parametrize("hidden", [(), ((64, 96),)])
async def test_sources_are_confirmed_by_hiding_each(service: Service, hidden: tuple[tuple[int, int], ...]) -> None:
    requested = Provenance(span_tokens=SIZE, num_spans=3, confirm=True)
    events = await service.ask(requested, max_tokens=5, hidden=hidden)
    found, token_ids = attribution(finished(events)), answer(events)
    assert 0 < len(found.sources) <= 3
    for source in found.sources:
        span = (source.token_start, source.token_end)
        drop = sum(echo_scores(token_ids, hidden)) - sum(echo_scores(token_ids, union([*hidden, span])))
        assert source.drop == pytest.approx(drop)
        assert source.contrast is not None
    scored = [row for row in service.rows if row.num_scored]
    assert {row.token_ids for row in scored} == {(*QUESTION, *token_ids)}
    assert {row.num_scored for row in scored} == {5}
    assert len(scored) == 1 + len(found.sources)
    assert {row.hidden for row in scored} >= {hidden}
    works = [plan.work for plan in service.ranks.plans if isinstance(plan.work, Decode)]
    assert sum(any(row.num_scored for row in work.rows) for work in works) == 1, "they run in a batch"


def baselines(service: Service) -> list[Row]:
    """The rows that measured one."""
    return [row for row in service.rows if row.spans is not None and row.spans.num_rows]


async def test_sources_are_ranked_by_contrast_with_a_neutral_question(service: Service) -> None:
    found = attribution(finished(await service.ask(Provenance(span_tokens=SIZE, num_spans=64), max_tokens=4)))
    [probe] = baselines(service)
    assert probe.token_index == -1
    assert probe.spans == Spans(SIZE, 2, probe.start + probe.num_tokens, num_rows=NUM_ROWS, num_lead=4)
    chunks = [plan.work for plan in service.ranks.plans if isinstance(plan.work, Prefill) and plan.work.start == END]
    question = [token_id for chunk in chunks for token_id in chunk.token_ids] + [*probe.token_ids]
    assert NEUTRAL_QUESTION in byte_tokenizer().decode(question)
    baseline = echo_attention(SPANS, (), END + len(question) - 1)
    expected = mean(0, 4) - np.frombuffer(baseline.means, np.float32)
    spans = zip(SPANS, expected[:-NUM_OTHER_SHARES], strict=True)
    contrasts = {(source.token_start, source.token_end): source.contrast for source in found.sources}
    assert contrasts == pytest.approx({span: contrast for span, contrast in spans if contrast > 0}, abs=1e-6)
    assert 0 < len(contrasts) < len(SPANS)
    ranked = [source.contrast or 0.0 for source in found.sources]
    assert ranked == sorted(ranked, reverse=True)


async def test_baseline_is_measured_once_for_each_context(service: Service) -> None:
    requested = Provenance(span_tokens=SIZE)
    first = attribution(finished(await service.ask(requested, max_tokens=4)))
    assert attribution(finished(await service.ask(requested, max_tokens=4))) == first
    await service.client.fork_context("moby", "whole")
    await service.ask(requested, max_tokens=4, context="whole")
    assert len(baselines(service)) == 1, "a fork has the same tokens"
    await service.client.fork_context("moby", "part", num_tokens=END - 1)
    await service.client.ingest("whole", [3] * 40, append=True)
    starts = list[int]()
    for name in ("part", "whole", "part", "whole", "moby"):
        await service.ask(requested, max_tokens=4, context=name)
        starts = [row.start for row in baselines(service)]
    assert [start - starts[0] for start in starts] == [0, -1, 40]
    await service.ask(Provenance(span_tokens=SIZE, layers=(3,)), max_tokens=4)
    await service.ask(requested, max_tokens=4, hidden=[(40, 50)])
    await service.ask(requested, max_tokens=4, hidden=[(40, 50)])
    assert [row.hidden for row in baselines(service)[3:]] == [(), ((40, 50),), ((40, 50),)], "those are not stored"


async def test_baseline_is_freed_with_the_last_context_of_its_segment(service: Service) -> None:
    await service.ask(Provenance(span_tokens=SIZE), max_tokens=4)
    await service.client.fork_context("moby", "fork")
    owner = weakref.ref(service.engine.attribution_context("moby").owner)
    await service.client.delete_context("moby")
    gc.collect()
    assert owner() is not None
    await service.client.delete_context("fork")
    await service.client.ingest("next", [3] * 40)  # the plan of a step names the released segments
    gc.collect()
    assert owner() is None


async def test_baseline_fits_after_a_context_without_room(tmp_path: Path) -> None:
    ranks = FakeRanks(2, 400, vocab=128)
    async with (
        gated.serving(ranks, tmp_path / "model", block_size=64) as (_, address),
        AsyncClient(address) as client,
    ):
        await client.ingest("moby", [1 + i % 100 for i in range(4096 - len(QUESTION) - 1)])
        options: dict[str, Any] = {"context": "moby", "provenance": Provenance(span_tokens=SIZE), "max_tokens": 1}
        found = attribution(finished([event async for event in client.generate(QUESTION, **options)]))
    assert found.sources
    works = [plan.work for plan in ranks.plans if isinstance(plan.work, Decode)]
    [probe] = [row for work in works for row in work.rows if row.spans is not None and row.spans.num_rows]
    assert len(probe.token_ids) == 4


async def test_resumed_answer_counts_each_token_once(service: Service) -> None:
    options: dict[str, Any] = {"request_id": "one", "resumable": True, "max_tokens": 8}
    first = await service.ask(**options)
    again = await service.ask(**options)
    assert answer(first) == answer(again)
    assert attribution(finished(again)).num_tokens == 8
    assert finished(again).attribution == finished(first).attribution


async def test_probes_release_all_resources(service: Service) -> None:
    resident = [worker.tokens for worker in (await service.client.cluster()).workers]
    await service.ask(Provenance(span_tokens=SIZE, confirm=True, ranking="contrast"), max_tokens=3, num_samples=2)
    assert [worker.tokens for worker in (await service.client.cluster()).workers] == resident


@pytest.mark.parametrize(
    ("provenance", "options", "field"),
    [
        (Provenance(span_tokens=128), {}, "provenance.span_token_count"),
        (Provenance(span_tokens=16), {}, "provenance.span_token_count"),
        (Provenance(num_spans=0), {}, "provenance.span_count"),
        (Provenance(layers=(3, 4)), {}, "provenance.layers[1]"),
        (Provenance(), {"context": None}, "provenance"),
        (None, {"hidden": [(0, 9), (240, 251)]}, "hidden[1]"),
        (None, {"hidden": [(0, 9), (8, 10)]}, "hidden[1]"),
        (None, {"hidden": [(3, 3)]}, "hidden[0]"),
        (None, {"hidden": [(0, 1)], "context": None}, "hidden[0]"),
    ],
)
async def test_invalid_field_is_named(
    service: Service, provenance: Provenance | None, options: dict[str, Any], field: str
) -> None:
    requested = {"context": "moby", "provenance": provenance, "max_tokens": 2} | options
    with pytest.raises(InvalidArgument) as caught:
        _ = [event async for event in service.client.generate(QUESTION, **requested)]
    assert caught.value.field == field


async def test_missing_context_is_not_found(service: Service) -> None:
    with pytest.raises(NotFound, match="contexts/ahab"):
        _ = [event async for event in service.client.ask("ahab", "who?", provenance=Provenance())]


async def test_model_without_a_full_attention_layer_refuses_attribution(tmp_path: Path) -> None:
    ranks = FakeRanks(vocab=128, windows=WindowSpec(reaches=(AttentionSpan(window=32),), num_blocks=100))
    async with (
        gated.serving(ranks, tmp_path / "model", block_size=64) as (_, address),
        AsyncClient(address) as client,
    ):
        await client.ingest("moby", [1] * 40)
        with pytest.raises(InvalidArgument) as caught:
            _ = [event async for event in client.ask("moby", "who?", provenance=Provenance())]
    assert caught.value.field == "provenance"


async def test_caller_limited_to_one_answer_gets_several_samples_confirmed(tmp_path: Path) -> None:
    """The engine does not know stop strings: the second sample continues until it is cancelled."""
    ranks = FakeRanks(2, 400, vocab=128)
    one = credentials(tmp_path / "tenants", acme=Quotas(generations=1))
    async with (
        gated.serving(ranks, tmp_path / "model", authenticator=one, block_size=64) as (_, address),
        AsyncClient(address, credential=credential_of(ACME)) as client,
    ):
        await client.ingest("moby", [1 + i % 100 for i in range(END)])
        plain = [event async for event in client.generate(QUESTION, context="moby", max_tokens=6)]
        stop = "".join(event.text for event in plain if isinstance(event, Delta))[-2:]
        options: dict[str, Any] = {"max_tokens": 1000, "stop": [stop], "num_samples": 2}
        requested = Provenance(span_tokens=SIZE, num_spans=2, confirm=True)
        async with asyncio.timeout(20):
            events = [e async for e in client.generate(QUESTION, context="moby", provenance=requested, **options)]
    for sample in range(2):
        end = finished(events, sample)
        assert end.reason == "stop"
        assert all(source.drop is not None for source in attribution(end).sources)
