"""Requests to generate, and the events of their streams."""

from collections.abc import Iterable
from datetime import timedelta
from typing import get_args

from google.protobuf.duration_pb2 import Duration

from longleaf.codec.names import context_id, context_name, encodable, encode_ids
from longleaf.codec.sampling import decode_sampling, encode_sampling
from longleaf.errors import InvalidArgument
from longleaf.messages import (
    Delta,
    Event,
    Finished,
    FinishReason,
    Generate,
    Progress,
    SamplingOptions,
    Started,
    Timings,
    Usage,
)
from longleaf.v1 import generation_pb2 as generation_pb
from longleaf.v1 import generation_service_pb2 as service_pb

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


def encode_generate(
    input: str | Iterable[int],
    *,
    context: str | None,
    use_chat_template: bool | None,
    sampling: SamplingOptions,
) -> service_pb.GenerateRequest:
    """Raises InvalidArgument when a value does not fit its field."""
    message = service_pb.GenerateRequest(context=context_name(context) if context is not None else "")
    message.sampling.CopyFrom(encode_sampling(sampling))
    if use_chat_template is not None:
        message.use_chat_template = use_chat_template
    if isinstance(input, str):
        message.text = encodable(input, "text")
    else:
        message.token_ids.CopyFrom(encode_ids(input))
    return message


def decode_generate(message: service_pb.GenerateRequest, random_seed: int) -> Generate:
    """Raises InvalidArgument naming the field."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input", "give text or token_ids")
    return Generate(
        input=message.text if kind == "text" else tuple(message.token_ids.ids),
        context=context_id(message.context, "context") if message.context else None,
        use_chat_template=message.use_chat_template if message.HasField("use_chat_template") else None,
        sampling=decode_sampling(message.sampling, random_seed),
    )


def encode_event(event: Event) -> service_pb.GenerateResponse:
    match event:
        case Started(prompt_tokens, cached_tokens):
            started = generation_pb.Started(prompt_token_count=prompt_tokens, cached_token_count=cached_tokens)
            return service_pb.GenerateResponse(started=started)
        case Progress(processed, total):
            progress = generation_pb.Progress(processed_token_count=processed, total_token_count=total)
            return service_pb.GenerateResponse(progress=progress)
        case Delta(index, token_ids, text):
            delta = generation_pb.Delta(token_index=index, token_ids=token_ids, text=text)
            return service_pb.GenerateResponse(delta=delta)
        case Finished():
            return service_pb.GenerateResponse(finished=_encode_finished(event))


def _encode_finished(event: Finished) -> generation_pb.Finished:
    usage, timings = event.usage, event.timings
    reason = FINISH_REASONS.index(event.reason) + 1
    return generation_pb.Finished(
        finish_reason=generation_pb.FinishReason.Name(reason),
        matched_stop=event.matched_stop,
        usage=generation_pb.Usage(
            prompt_token_count=usage.prompt_tokens,
            cached_token_count=usage.cached_tokens,
            completion_token_count=usage.completion_tokens,
        ),
        timings=generation_pb.Timings(
            queue_duration=_duration(timings.queue_seconds),
            first_token_duration=_duration(timings.first_token_seconds),
            decode_duration=_duration(timings.decode_seconds),
        ),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration


def decode_event(message: service_pb.GenerateResponse) -> Event:
    match message.WhichOneof("event"):
        case "started":
            return Started(message.started.prompt_token_count, message.started.cached_token_count)
        case "progress":
            return Progress(message.progress.processed_token_count, message.progress.total_token_count)
        case "delta":
            return Delta(message.delta.token_index, tuple(message.delta.token_ids), message.delta.text)
        case _:
            return _decode_finished(message.finished)


def _decode_finished(message: generation_pb.Finished) -> Finished:
    usage, timings = message.usage, message.timings
    return Finished(
        FINISH_REASONS[message.finish_reason - 1],
        message.matched_stop,
        Usage(usage.prompt_token_count, usage.cached_token_count, usage.completion_token_count),
        Timings(
            timings.queue_duration.ToTimedelta().total_seconds(),
            timings.first_token_duration.ToTimedelta().total_seconds(),
            timings.decode_duration.ToTimedelta().total_seconds(),
        ),
    )
