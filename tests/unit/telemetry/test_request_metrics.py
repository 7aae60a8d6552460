"""Counters and histograms of calls and generations."""

import asyncio
from collections.abc import Iterator
from itertools import chain

import pytest
from grpc import StatusCode
from prometheus_client import CollectorRegistry, generate_latest

from coordinator.engine_messages import Admitted, Ended, Event, Tokens
from coordinator.telemetry.observers import CallRecord
from coordinator.telemetry.request_metrics import FIRST_TOKEN_SECONDS, OUTCOMES, RequestMetrics
from longleaf.sampling import Token
from longleaf.types import Progress
from tests.support.scraping import Scraped


class Bench:
    """Metrics on a manual clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.registry = CollectorRegistry()
        self.metrics = RequestMetrics(self.registry, "lama", lambda: self.now)

    @property
    def seen(self) -> Scraped:
        return Scraped(generate_latest(self.registry).decode())

    def generate(self, *events: tuple[float, Event], tenant: str = "acme", end: float = 0.0) -> None:
        """A generation with these events, each with its delay in seconds after the previous one."""
        with self.metrics.generation("some-request", tenant) as emit:
            for seconds, event in events:
                self.now += seconds
                emit(event)
            self.now += end

    def call(self, code: str, method: str = "/longleaf.v1.GenerationService/Generate", tenant: str = "acme") -> None:
        record = CallRecord(method, "ipv4:10.0.0.1:1", {})
        with self.metrics.call(record):
            record.tenant, record.code = tenant, code

    def spent(self, name: str, tenant: str = "acme") -> tuple[float, float]:
        """Count and sum of a histogram."""
        seen = self.seen
        return seen.value(f"{name}_count", tenant=tenant), seen.value(f"{name}_sum", tenant=tenant)


def tokens(index: int, count: int = 1, sample: int = 0) -> Tokens:
    return Tokens(index, tuple(Token(7) for _ in range(count)), sample)


def ended(sample: int = 0) -> Ended:
    return Ended("length", 50, 20, 3, 0.0, 0.0, 0.0, sample)


ADMITTED = Admitted(50, 20)


def test_times_of_a_generation_are_measured_between_events() -> None:
    bench = Bench()
    bench.generate(
        (0.5, Admitted(50, 20, queue_position=2)),
        (1.5, ADMITTED),
        (1.0, Progress(50, 50)),
        (2.0, tokens(0)),
        (0.25, tokens(1)),
        (0.75, tokens(2)),
        (0.0, ended()),
        end=4.0,
    )
    assert bench.spent("longleaf_request_queue_seconds") == (1, 2.0)
    assert bench.spent("longleaf_request_prefill_seconds") == (1, 3.0)
    assert bench.spent("longleaf_time_to_first_token_seconds") == (1, 5.0)
    assert bench.spent("longleaf_inter_token_latency_seconds") == (2, 1.0)
    assert bench.spent("longleaf_request_decode_seconds") == (1, 5.0)
    assert bench.spent("longleaf_e2e_request_latency_seconds") == (1, 10.0)


def test_bucket_includes_its_bound() -> None:
    bench = Bench()
    for bound in FIRST_TOKEN_SECONDS:
        bench.now = 0.0
        bench.generate((bound, tokens(0)))
    name, seen = "longleaf_time_to_first_token_seconds_bucket", bench.seen
    assert seen.value(name, tenant="acme", le="+Inf") == len(FIRST_TOKEN_SECONDS)
    for number, bound in enumerate(FIRST_TOKEN_SECONDS, 1):
        assert seen.value(name, tenant="acme", le=str(bound)) == number


def test_tokens_of_one_step_share_its_time() -> None:
    bench = Bench()
    bench.generate((0.0, ADMITTED), (1.0, tokens(0)), (2.0, tokens(1, count=4)))
    assert bench.spent("longleaf_inter_token_latency_seconds") == (4, 2.0)
    assert bench.seen.value("longleaf_inter_token_latency_seconds_bucket", tenant="acme", le="0.5") == 4


def test_samples_have_separate_times_and_one_first_token() -> None:
    bench = Bench()
    bench.generate(
        (0.0, ADMITTED),
        (1.0, tokens(0, sample=0)),
        (1.0, tokens(0, sample=1)),
        (1.0, tokens(1, sample=0)),
        (1.0, tokens(1, sample=1)),
        (0.0, ended(0)),
        (0.0, ended(1)),
    )
    assert bench.spent("longleaf_time_to_first_token_seconds") == (1, 1.0)
    assert bench.spent("longleaf_inter_token_latency_seconds") == (2, 4.0)
    assert bench.seen.value("longleaf_generated_tokens_total", tenant="acme") == 4
    assert bench.seen.value("longleaf_prompt_tokens_total", tenant="acme") == 50


def test_preempted_generation_counts_prompt_and_queue_time_once() -> None:
    bench = Bench()
    again = Admitted(50, 45)
    bench.generate((2.0, ADMITTED), (1.0, tokens(0)), (1.0, Admitted(50, 20, 3)), (5.0, again), (1.0, tokens(1)))
    assert bench.spent("longleaf_request_queue_seconds") == (1, 2.0)
    assert bench.seen.value("longleaf_prompt_tokens_total", tenant="acme") == 50
    assert bench.seen.value("longleaf_cached_prompt_tokens_total", tenant="acme") == 20


def test_prompt_of_a_resumed_generation_counts_when_it_ends() -> None:
    bench = Bench()
    bench.generate((0.0, tokens(7)), (0.0, ended()))
    assert bench.seen.value("longleaf_prompt_tokens_total", tenant="acme") == 50


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, ValueError])
def test_failed_generation_counts_tokens_but_no_length(error: type[BaseException]) -> None:
    bench = Bench()

    def generate() -> None:
        with bench.metrics.generation("r", "acme") as emit:
            emit(ADMITTED)
            emit(tokens(0))
            raise error

    with pytest.raises(error):
        generate()
    assert bench.seen.value("longleaf_generated_tokens_total", tenant="acme") == 1
    assert bench.spent("longleaf_e2e_request_latency_seconds") == (0, 0)
    assert bench.spent("longleaf_request_decode_seconds") == (0, 0)


def test_tenants_are_counted_separately() -> None:
    bench = Bench()
    bench.generate((0.0, ADMITTED), (0.0, tokens(0, count=3)))
    bench.generate((0.0, ADMITTED), (0.0, tokens(0, count=5)), tenant="bolt")
    assert bench.seen.value("longleaf_generated_tokens_total", tenant="acme") == 3
    assert bench.seen.value("longleaf_generated_tokens_total", tenant="bolt") == 5


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("OK", "ok"),
        ("CANCELLED", "cancelled"),
        ("INVALID_ARGUMENT", "refused"),
        ("UNAUTHENTICATED", "refused"),
        ("RESOURCE_EXHAUSTED", "refused"),
        ("UNAVAILABLE", "failed"),
        ("DEADLINE_EXCEEDED", "failed"),
        ("INTERNAL", "failed"),
    ],
)
def test_call_counts_under_its_code(code: str, outcome: str) -> None:
    bench = Bench()
    bench.call(code)
    bench.call(code)
    labels = {"tenant": "acme", "kind": "Generate", "outcome": outcome, "code": code}
    assert bench.seen.value("longleaf_requests_total", **labels) == 2


def test_call_that_raises_without_a_code_counts_as_failed() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="boom"), bench.metrics.call(CallRecord("/a/Generate", "", {})):
        raise ValueError("boom")
    labels = {"tenant": "", "kind": "Generate", "outcome": "failed", "code": "UNKNOWN"}
    assert bench.seen.value("longleaf_requests_total", **labels) == 1


def test_outcomes_are_grpc_codes() -> None:
    assert set(OUTCOMES) <= {code.name for code in StatusCode}


def texts(seen: Scraped) -> Iterator[str]:
    samples = chain.from_iterable(family.samples for family in seen.families.values())
    return chain.from_iterable(sample.labels.values() for sample in samples)


def test_labels_are_bounded_and_never_identify_a_request() -> None:
    bench = Bench()
    bench.generate((0.0, ADMITTED), (0.0, tokens(0)))
    bench.call("OK")
    assert bench.seen.label_names == {"model", "tenant", "kind", "outcome", "code", "le"}
    assert not any("request" in text for text in texts(bench.seen))
    assert {sample.labels["model"] for family in bench.seen.families.values() for sample in family.samples} == {"lama"}
