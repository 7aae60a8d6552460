"""The Observer that counts calls and generations for Prometheus."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from coordinator.engine_messages import Admitted, Ended, Event, Tokens
from coordinator.telemetry.observers import CallRecord, EventSink

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Upper bounds of buckets, equal to those of vLLM, so that its dashboards and alerts can be reused."""
OUTCOMES = {
    "OK": "ok",
    "CANCELLED": "cancelled",
    **dict.fromkeys(
        (
            "ALREADY_EXISTS",
            "FAILED_PRECONDITION",
            "INVALID_ARGUMENT",
            "NOT_FOUND",
            "OUT_OF_RANGE",
            "PERMISSION_DENIED",
            "RESOURCE_EXHAUSTED",
            "UNAUTHENTICATED",
            "UNIMPLEMENTED",
        ),
        "refused",
    ),
}
"""By gRPC status code; all other codes count as `failed`: the service could not serve the call, or not in time."""


@dataclass(frozen=True)
class TenantMetrics:
    """Counters of one tenant's generations; times in seconds."""

    first_token: Histogram
    between_tokens: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    whole: Histogram
    prompt_tokens: Counter
    cached_tokens: Counter
    generated_tokens: Counter


class GenerationTimes:
    """Timestamps of one generation, as its reader sees them, starting with its admission."""

    def __init__(self, metrics: TenantMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._admitted = clock()
        self._began: float | None = None
        self._first_token: float | None = None
        self._last_tokens: dict[int, float] = {}
        """By sample."""
        self._is_prompt_counted = False

    def on_event(self, event: Event) -> None:
        """Records an event."""
        if isinstance(event, Tokens):
            self._take_tokens(event)
        elif isinstance(event, Admitted):
            if event.queue_position == 0:
                self._begin()
                self._count_prompt(event)
        elif isinstance(event, Ended):
            self._count_prompt(event)

    def _begin(self) -> None:
        """It may be preempted and start again."""
        if self._began is None:
            self._began = self._clock()
            self._metrics.queue.observe(self._began - self._admitted)

    def _count_prompt(self, event: Admitted | Ended) -> None:
        if not self._is_prompt_counted:
            self._is_prompt_counted = True
            self._metrics.prompt_tokens.inc(event.prompt_tokens)
            self._metrics.cached_tokens.inc(event.cached_tokens)

    def _take_tokens(self, event: Tokens) -> None:
        now, metrics, count = self._clock(), self._metrics, len(event.tokens)
        metrics.generated_tokens.inc(count)
        before = self._last_tokens.get(event.sample)
        self._last_tokens[event.sample] = now
        if before is not None:
            between = (
                now - before
            ) / count  # several tokens arrive at once from a step with drafts, or when the reader was behind
            for _ in range(count):
                metrics.between_tokens.observe(between)
        elif self._first_token is None:
            self._first_token = now
            metrics.first_token.observe(now - self._admitted)
            if self._began is not None:
                metrics.prefill.observe(now - self._began)

    def end(self) -> None:
        """The generation is complete."""
        now = self._clock()
        self._metrics.whole.observe(now - self._admitted)
        if self._first_token is not None:
            self._metrics.decode.observe(now - self._first_token)


class RequestMetrics:
    """An Observer. Labels are bounded: a tenant is an authenticated one, a kind is an existing method. `clock` returns
    seconds."""

    def __init__(self, registry: CollectorRegistry, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._model = model
        self._clock = clock
        self._tenants: dict[str, TenantMetrics] = {}
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the admission of a generation to its first token.",
            FIRST_TOKEN_SECONDS,
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between two consecutive tokens of an answer.", TOKEN_SECONDS
        )
        self._queue = self._histogram(
            "request_queue_seconds", "From the admission of a generation to its start.", REQUEST_SECONDS
        )
        self._prefill = self._histogram(
            "request_prefill_seconds", "From the start of a generation to its first token.", REQUEST_SECONDS
        )
        self._decode = self._histogram(
            "request_decode_seconds",
            "From the first token of a completed generation to its end.",
            REQUEST_SECONDS,
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds",
            "From the admission of a completed generation to its end.",
            REQUEST_SECONDS,
        )
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of started generations, including those of their contexts."
        )
        self._cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens whose keys and values were already in memory."
        )
        self._generated_tokens = self._counter("generated_tokens", "Generated tokens.")
        self._requests = self._counter("requests", "Ended calls of clients.", "kind", "outcome", "code")

    def _histogram(self, name: str, help_text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"longleaf_{name}", help_text, ("model", "tenant"), buckets=bounds, registry=self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"longleaf_{name}", help_text, ("model", "tenant", *labels), registry=self._registry)

    @contextmanager
    def call(self, record: CallRecord) -> Generator[None, None, None]:
        try:
            yield
        finally:
            code = record.code or "UNKNOWN"
            kind = record.method.rpartition("/")[2]
            outcome = OUTCOMES.get(code, "failed")
            self._requests.labels(self._model, record.tenant, kind, outcome, code).inc()

    @contextmanager
    def generation(self, request_id: str, tenant: str) -> Generator[EventSink, None, None]:
        going = GenerationTimes(self._of(tenant), self._clock)
        yield going.on_event
        going.end()  # not for a generation that ended with an error or a cancellation

    def _of(self, tenant: str) -> TenantMetrics:
        """Counters of one tenant; cached, because a lookup costs more than an increment."""
        if (found := self._tenants.get(tenant)) is None:
            labels = (self._model, tenant)
            found = self._tenants[tenant] = TenantMetrics(
                first_token=self._first_token.labels(*labels),
                between_tokens=self._between_tokens.labels(*labels),
                queue=self._queue.labels(*labels),
                prefill=self._prefill.labels(*labels),
                decode=self._decode.labels(*labels),
                whole=self._whole.labels(*labels),
                prompt_tokens=self._prompt_tokens.labels(*labels),
                cached_tokens=self._cached_tokens.labels(*labels),
                generated_tokens=self._generated_tokens.labels(*labels),
            )
        return found
