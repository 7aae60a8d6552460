"""Domain types to protobuf messages and back: the only module that knows both. Errors are `longleaf.status`'s part.

Decoding a request raises InvalidArgument naming the field by its path on the wire. Decoding a response trusts it.
"""

import math
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, get_args

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from longleaf.errors import InvalidArgument
from longleaf.messages import (
    Cluster,
    Context,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generate,
    IngestHeader,
    IngestPhase,
    IngestPiece,
    IngestProgress,
    ModelInfo,
    Progress,
    RankShare,
    SamplingOptions,
    Started,
    Timings,
    Usage,
    Worker,
)
from longleaf.sampling import Sampling
from longleaf.step import MergeTiming
from longleaf.v1 import cluster_service_pb2 as cluster_pb
from longleaf.v1 import context_pb2 as context_pb
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1 import generation_pb2 as generation_pb
from longleaf.v1 import generation_service_pb2 as service_pb

_CONTEXT_NAME = re.compile(r"contexts/([a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?)")
_WIRE_NAMES = {"max_tokens": "max_token_count"}
"""Sampling's fields whose names differ on the wire."""
_FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_PHASES: tuple[IngestPhase, ...] = get_args(IngestPhase)


def context_name(context: str) -> str:
    """Resource name of the context with this id; a full resource name is taken as it is."""
    name = context if context.startswith("contexts/") else f"contexts/{context}"
    return encodable(name, "context")


def context_id(name: str, field: str = "name") -> str:
    """Id in the resource name `name`, the value of `field`. Raises InvalidArgument when it is not such a name."""
    match = _CONTEXT_NAME.fullmatch(name)
    if match is None:
        shown = name if len(name) <= 100 else name[:100] + "…"
        rule = "1 to 63 of a-z 0-9 . _ -, a letter or digit first and last"
        raise InvalidArgument(field, f"{shown!r} is not contexts/ID with ID of {rule}")
    return match[1]


# Sampling


def encode_sampling(options: SamplingOptions) -> generation_pb.SamplingParams:
    """Raises InvalidArgument when a value does not fit its field."""
    message = generation_pb.SamplingParams()
    values: Mapping[str, object] = options
    for name, value in values.items():
        if value is not None and name != "stop":
            _set(message, name, value)
    message.stop.extend(encodable(stop, "sampling.stop") for stop in options.get("stop") or ())
    return message


def _set(message: generation_pb.SamplingParams, name: str, value: Any) -> None:
    field = _WIRE_NAMES.get(name, name)
    try:
        setattr(message, field, value)
    except (ValueError, TypeError) as error:
        if isinstance(error, ValueError):
            Sampling(**{name: value}).check()  # tells the limit
        raise InvalidArgument(f"sampling.{field}", f"{value!r} does not fit: {error}") from None


def decode_sampling(message: generation_pb.SamplingParams, random_seed: int) -> Sampling:
    """Sampling with its defaults filled in, and `random_seed` when the caller gave none. Raises InvalidArgument."""
    names = (name for name in Sampling.__struct_fields__ if name not in ("stop", "seed"))
    given = {name: _WIRE_NAMES.get(name, name) for name in names}
    values = {name: getattr(message, wire) for name, wire in given.items() if message.HasField(wire)}
    seed = message.seed if message.HasField("seed") else random_seed
    sampling = Sampling(**values, seed=seed, stop=tuple(message.stop))
    sampling.check()
    return sampling


# Generations


def _encode_ids(token_ids: Iterable[int]) -> generation_pb.TokenIds:
    try:
        return generation_pb.TokenIds(ids=token_ids)
    except (ValueError, TypeError) as error:
        raise InvalidArgument("token_ids", str(error)) from None


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
        message.token_ids.CopyFrom(_encode_ids(input))
    return message


def encodable(text: str, field: str) -> str:
    """`text`. Raises InvalidArgument naming `field` when it has lone surrogates, which UTF-8 cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, f"is not Unicode text: lone surrogate at character {error.start}") from None
    return text


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
    reason = _FINISH_REASONS.index(event.reason) + 1
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
        _FINISH_REASONS[message.finish_reason - 1],
        message.matched_stop,
        Usage(usage.prompt_token_count, usage.cached_token_count, usage.completion_token_count),
        Timings(
            timings.queue_duration.ToTimedelta().total_seconds(),
            timings.first_token_duration.ToTimedelta().total_seconds(),
            timings.decode_duration.ToTimedelta().total_seconds(),
        ),
    )


# Contexts


def encode_context(context: Context) -> context_pb.Context:
    return context_pb.Context(
        name=context_name(context.id),
        token_count=context.tokens,
        kv_bytes=context.kv_bytes,
        create_time=_timestamp(context.created),
        update_time=_timestamp(context.updated),
        rank_shares=[
            context_pb.RankShare(rank=share.rank, token_count=share.tokens, kv_bytes=share.kv_bytes)
            for share in context.shares
        ],
    )


def _timestamp(seconds: float) -> Timestamp:
    fraction, whole = math.modf(seconds)
    return Timestamp(seconds=int(whole), nanos=int(fraction * 1e6) * 1000)


def decode_context(message: context_pb.Context) -> Context:
    return Context(
        id=message.name.removeprefix("contexts/"),
        tokens=message.token_count,
        kv_bytes=message.kv_bytes,
        created=_seconds(message.create_time),
        updated=_seconds(message.update_time),
        shares=tuple(RankShare(share.rank, share.token_count, share.kv_bytes) for share in message.rank_shares),
    )


def _seconds(time: Timestamp) -> float:
    return time.seconds + time.nanos / 1e9


def encode_ingest_piece(piece: IngestPiece) -> ingest_pb.IngestContextRequest:
    match piece:
        case IngestHeader(context, append, total_bytes):
            config = ingest_pb.IngestConfig(name=context_name(context), append=append, total_size_bytes=total_bytes)
            return ingest_pb.IngestContextRequest(config=config)
        case bytes():
            return ingest_pb.IngestContextRequest(text=piece)
        case _:
            return ingest_pb.IngestContextRequest(token_ids=_encode_ids(piece))


def decode_ingest_piece(message: ingest_pb.IngestContextRequest) -> IngestPiece:
    """Raises InvalidArgument naming the field."""
    match message.WhichOneof("payload"):
        case "config":
            config = message.config
            total = config.total_size_bytes if config.HasField("total_size_bytes") else None
            return IngestHeader(context_id(config.name, "config.name"), config.append, total)
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case _:
            raise InvalidArgument("payload", "is missing: give config, text or token_ids")


def encode_ingest_progress(progress: IngestProgress) -> ingest_pb.IngestContextResponse:
    return ingest_pb.IngestContextResponse(
        phase=ingest_pb.IngestPhase.Name(_PHASES.index(progress.phase) + 1),
        received_size_bytes=progress.received_bytes,
        processed_token_count=progress.processed,
        total_token_count=progress.total,
        tokens_per_second=progress.tokens_per_second,
        context=encode_context(progress.context) if progress.context else None,
    )


def decode_ingest_progress(message: ingest_pb.IngestContextResponse) -> IngestProgress:
    return IngestProgress(
        phase=_PHASES[message.phase - 1],
        received_bytes=message.received_size_bytes,
        processed=message.processed_token_count,
        total=message.total_token_count,
        tokens_per_second=message.tokens_per_second,
        context=decode_context(message.context) if message.HasField("context") else None,
    )


# The cluster. Its structs name the fields in the order and with the meaning of the messages, but shorter.

_MODEL_NAMES = {"max_context_token_count": "max_context_tokens"}
_WORKER_NAMES = {"token_count": "tokens", "max_token_count": "max_tokens"}


def encode_cluster(cluster: Cluster) -> cluster_pb.Cluster:
    model, descriptor = cluster.model, cluster_pb.ModelInfo.DESCRIPTOR
    return cluster_pb.Cluster(
        model=cluster_pb.ModelInfo(
            **{field: getattr(model, _MODEL_NAMES.get(field, field)) for field in descriptor.fields_by_name}
        ),
        workers=[_encode_worker(worker) for worker in cluster.workers],
        world_size=cluster.world_size,
        epoch=cluster.epoch,
        launcher=cluster.launcher,
        merge=cluster.merge,
        transport=cluster.transport,
        merge_timings=[
            cluster_pb.MergeTiming(row_count=timing.rows, merge=timing.merge, latency_us=timing.microseconds)
            for timing in cluster.merge_timings
        ],
        waiting_count=cluster.waiting,
        running_count=cluster.running,
    )


def _encode_worker(worker: Worker) -> cluster_pb.Worker:
    fields = cluster_pb.Worker.DESCRIPTOR.fields_by_name
    return cluster_pb.Worker(**{field: getattr(worker, _WORKER_NAMES.get(field, field)) for field in fields})


def decode_cluster(message: cluster_pb.Cluster) -> Cluster:
    model = cluster_pb.ModelInfo.DESCRIPTOR.fields_by_name
    worker = cluster_pb.Worker.DESCRIPTOR.fields_by_name
    return Cluster(
        model=ModelInfo(**{_MODEL_NAMES.get(field, field): getattr(message.model, field) for field in model}),
        workers=tuple(
            Worker(**{_WORKER_NAMES.get(field, field): getattr(one, field) for field in worker})
            for one in message.workers
        ),
        world_size=message.world_size,
        epoch=message.epoch,
        launcher=message.launcher,
        merge=message.merge,
        transport=message.transport,
        merge_timings=tuple(MergeTiming(t.row_count, t.merge, dict(t.latency_us)) for t in message.merge_timings),
        waiting=message.waiting_count,
        running=message.running_count,
    )
