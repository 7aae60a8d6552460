"""Responses of both kinds of completions, streamed and whole."""

import time
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response

from gateway.bodies import MemoryLease
from gateway.errors import HttpProblem, problem_of
from gateway.generations import EventStream, GenerationEvents, PendingAnswer, respond
from gateway.models import MISSING
from gateway.openai.sources import SourceReader
from gateway.sse import DONE, event
from longleaf.sampling import Logprobs
from longleaf.types import Delta, Finished, Started, Usage

LEAST_LOGPROB = -9999.0
"""Replaces a logprob of -inf, which JSON cannot represent and which OpenAI's types do not allow to be null. vLLM sends
the same value."""
REASONS = {"end_token": "stop", "stop": "stop", "stop_token": "stop", "length": "length"}
Names = dict[str, str]


class ChunkFormatter(Protocol):
    """Formats the parts of an answer."""

    num_samples: int
    with_usage: bool
    """Whether the last chunk of a stream has the usage."""

    def begin(self) -> list[dict[str, Any]]:
        """Chunks before all others."""
        ...

    def delta(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a Delta."""
        ...

    def finish(self, finished: Finished, fields: dict[str, Any]) -> dict[str, Any]:
        """The chunk that finishes a sample, with additional fields of its choice."""
        ...

    def last(self, usage: dict[str, Any], exactness: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the usage."""
        ...

    def whole(
        self, deltas: list[list[Delta]], ends: list[Finished], fields: list[dict[str, Any]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """The complete answer, if it is not streamed, with additional fields of each choice."""
        ...


def new_id(prefix: str) -> str:
    """Id of one answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


class PendingCompletion(NamedTuple):
    """A generation that has not started."""

    events: GenerationEvents
    formatter: ChunkFormatter
    sources: SourceReader
    is_streamed: bool
    names: Names
    """HTTP names of the service's fields, and of `context`."""
    ignored: list[str]
    """Names of fields of the request that are ignored."""


async def answer(request: Request, asking: PendingCompletion, share: MemoryLease) -> Response:
    """The answer, streamed or whole. Errors before its first byte become the status. Raises HttpProblem."""
    formatter = CompletionFormatter(asking.formatter, asking.sources)
    problem = partial(problem_of, names=asking.names, missing=MISSING)
    return await respond(
        request, PendingAnswer(asking.events, formatter, asking.is_streamed, problem, asking.ignored), share
    )


class CompletionFormatter:
    """Formats an answer as OpenAI's chunks, with the sources of each choice."""

    def __init__(self, formatter: ChunkFormatter, sources: SourceReader) -> None:
        self._formatter, self._sources = formatter, sources
        self.num_samples = formatter.num_samples

    def begin(self, started: Started | None) -> EventStream:
        del started
        return map(event, self._formatter.begin())

    def delta(self, delta: Delta) -> EventStream:
        is_shown = bool(delta.text or delta.reasoning or delta.tool_calls or any(text_logprobs([delta])))
        return map(event, self._formatter.delta(delta) if is_shown else [])

    async def finish(self, finished: Finished) -> EventStream:
        return [event(self._formatter.finish(finished, await self._sources.choice_fields(finished)))]

    def end(self, ends: list[Finished]) -> EventStream:
        if self._formatter.with_usage:
            yield event(self._formatter.last(usage_of(ends), exactness_of(ends)))
        yield DONE

    def error(self, problem: HttpProblem) -> bytes:
        return event(problem.body, "error")

    async def whole(self, deltas: list[list[Delta]], ends: list[Finished]) -> dict[str, Any]:
        fields = [await self._sources.choice_fields(end) for end in ends]
        return self._formatter.whole(deltas, ends, fields, usage_of(ends)) | exactness_of(ends)


def exactness_of(ends: list[Finished]) -> dict[str, Any]:
    """Whether all samples are exact, and otherwise the reason. For quantized weights, how they are computed."""
    note = next((end.exactness_note for end in ends if not end.is_exact), None)
    fields: dict[str, Any] = {"exact": True} if note is None else {"exact": False, "exactness_note": note}
    dequantization = next((end.dequantization for end in ends), "")
    return fields | ({"dequantization": dequantization} if dequantization else {})


def usage_of(ends: list[Finished]) -> dict[str, Any]:
    """Usage of all samples together, which share one prompt."""
    usage = ends[0].usage if ends else Usage()
    answered_tokens = sum(end.usage.completion_tokens for end in ends)
    drafted_tokens = sum(end.usage.drafted_tokens for end in ends)
    accepted_tokens = sum(end.usage.accepted_tokens for end in ends)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": answered_tokens,
        "total_tokens": usage.prompt_tokens + answered_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted_tokens,
            "rejected_prediction_tokens": drafted_tokens - accepted_tokens,
            "reasoning_tokens": sum(end.usage.reasoning_tokens for end in ends),
        },
    }


def reason_of(finished: Finished) -> str:
    """Finish reason in OpenAI's terms."""
    return REASONS.get(finished.reason, "stop")


def finite(logprob: float) -> float:
    """A logprob that JSON can represent."""
    return max(logprob, LEAST_LOGPROB)


def text_logprobs(deltas: Iterable[Delta]) -> Iterator[Logprobs]:
    """The logprobs of tokens with text; the end token has none and is omitted."""
    return (entry for delta in deltas for entry in delta.logprobs if entry.token_bytes)
