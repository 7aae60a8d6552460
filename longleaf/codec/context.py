"""Contexts and ingests."""

import math
from typing import get_args

from google.protobuf.timestamp_pb2 import Timestamp

from longleaf.codec.names import context_id, context_name, encode_ids
from longleaf.errors import InvalidArgument
from longleaf.messages import (
    Context,
    ForkContext,
    IngestHeader,
    IngestPhase,
    IngestPiece,
    IngestProgress,
    RankShare,
)
from longleaf.v1 import context_pb2 as context_pb
from longleaf.v1 import context_service_pb2 as ingest_pb

_PHASES: tuple[IngestPhase, ...] = get_args(IngestPhase)


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


def encode_fork(fork: ForkContext) -> ingest_pb.ForkContextRequest:
    """Raises InvalidArgument when a value does not fit its field."""
    try:
        return ingest_pb.ForkContextRequest(
            name=context_name(fork.source), new_name=context_name(fork.context), token_count=fork.tokens
        )
    except (ValueError, TypeError) as error:
        raise InvalidArgument("token_count", str(error)) from None


def decode_fork(message: ingest_pb.ForkContextRequest) -> ForkContext:
    """Raises InvalidArgument naming the field."""
    return ForkContext(
        source=context_id(message.name),
        context=context_id(message.new_name, "new_name"),
        tokens=message.token_count if message.HasField("token_count") else None,
    )


def encode_ingest_piece(piece: IngestPiece) -> ingest_pb.IngestContextRequest:
    match piece:
        case IngestHeader(context, append, total_bytes):
            config = ingest_pb.IngestConfig(name=context_name(context), append=append, total_size_bytes=total_bytes)
            return ingest_pb.IngestContextRequest(config=config)
        case bytes():
            return ingest_pb.IngestContextRequest(text=piece)
        case _:
            return ingest_pb.IngestContextRequest(token_ids=encode_ids(piece))


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
