"""Spans of one generation: one for the whole generation, and one for each phase."""

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from coordinator.engine_messages import Admitted, Ended, EndReason, Event, Tokens
from longleaf.tenants import name_of
from longleaf.types import Progress, Recovering

OPERATION = "text_completion"
REASONS: dict[EndReason, str] = {"end_token": "stop", "stop": "stop", "stop_token": "stop", "length": "length"}
CANCELLED = "cancelled"


class GenerationSpans:
    """Opens the span of a generation by `model`, and that of its time in the queue. `finish` or `fail` ends the spans.
    They contain neither input nor output."""

    def __init__(self, tracer: Tracer, model: str, request_id: str, tenant: str) -> None:
        self._tracer = tracer
        attributes = {
            "gen_ai.operation.name": OPERATION,
            "gen_ai.provider.name": "longleaf",
            "gen_ai.request.model": model,
            "longleaf.tenant": tenant,
            "longleaf.request": name_of(request_id),
        }
        self._whole = tracer.start_span(f"{OPERATION} {model}", kind=SpanKind.INTERNAL, attributes=attributes)
        self._name, self._phase = "queue", self._start("queue")
        self._num_tokens: dict[int, int] = {}
        """Generated tokens by sample."""
        self._num_drafted = self._num_accepted = 0
        self._reasons: dict[int, str] = {}
        """Finish reason by ended sample."""

    def _start(self, name: str) -> Span:
        return self._tracer.start_span(name, set_span_in_context(self._whole))

    def _begin_phase(self, name: str) -> None:
        if name != self._name:
            self._phase.end()
            self._name, self._phase = name, self._start(name)

    def record(self, event: Event) -> None:
        """Records `event`, as a change of phase or as an event of the span of the current phase."""
        match event:
            case Admitted():
                self._begin_phase("queue" if event.queue_position else "prefill")
                self._whole.set_attribute("gen_ai.usage.input_tokens", event.prompt_tokens)
                self._whole.set_attribute("longleaf.cached_tokens", event.cached_tokens)
            case Progress():
                self._phase.add_event("chunk", {"longleaf.tokens": event.processed, "longleaf.of": event.total})
            case Recovering():
                self._phase.add_event("recovering", {"longleaf.lost_tokens": event.lost_tokens})
            case Tokens():
                self._begin_phase("decode")
                self._num_tokens[event.sample] = self._num_tokens.get(event.sample, 0) + len(event.tokens)
                self._num_drafted += event.num_drafted
                self._num_accepted += event.num_accepted
            case Ended():
                self._reasons[event.sample] = REASONS[event.reason]
                self._num_tokens[event.sample] = event.completion_tokens

    def finish(self) -> None:
        """Ends the spans. A sample that a stop string ended has no event of its own."""
        for sample in self._num_tokens:
            self._reasons.setdefault(sample, "stop")
        self._end()

    def fail(self, reason: str) -> None:
        """Ends the spans for `reason`: CANCELLED, or the type of an error."""
        for span in (self._phase, self._whole):
            span.set_status(Status(StatusCode.ERROR, reason))
            span.set_attribute("error.type", reason)
        self._end()

    def _end(self) -> None:
        self._phase.end()
        self._whole.set_attribute("gen_ai.usage.output_tokens", sum(self._num_tokens.values()))
        self._whole.set_attribute("longleaf.drafted_tokens", self._num_drafted)
        self._whole.set_attribute("longleaf.accepted_tokens", self._num_accepted)
        if self._reasons:
            reasons = [self._reasons[sample] for sample in sorted(self._reasons)]
            self._whole.set_attribute("gen_ai.response.finish_reasons", reasons)
        self._whole.end()
