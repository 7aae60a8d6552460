"""Conversion of contexts and ingests."""

from functools import partial

from google.protobuf.duration_pb2 import Duration
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from longleaf.codec.context_text import decode_files, encode_files
from longleaf.codec.derived import Wire, derive
from longleaf.codec.names import bare_context_id, check_utf8, context_id, context_name, decode_ids, encode_ids
from longleaf.codec.scheduling_options import decode_scheduling, encode_scheduling
from longleaf.codec.times import decode_seconds, encode_lifetime, encode_time
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_number
from longleaf.types import (
    MAX_TIME,
    Context,
    ContextSettings,
    ForkContext,
    IngestHeader,
    IngestPiece,
    IngestProgress,
    PositionInfo,
    RecomputeResult,
    SkippedContext,
)
from longleaf.v1 import context_pb2 as context_pb
from longleaf.v1 import context_service_pb2 as ingest_pb

MAX_DISPLAY_NAME = 256
"""Maximum length in characters."""
MAX_UPLOAD_ID = 128
MAX_SYSTEM_BYTES = 32 << 10
MAX_PATHS = 16
"""Maximum number of paths in a field mask."""
_CONTEXT_NAME = Wire("name", context_name, bare_context_id)
_PATHS = ("display_name", "pinned", "expire_time", "ttl")


derive(
    PositionInfo,
    context_pb.PositionInfo,
    rope="rope_type",
    scaled_for="scaled_token_count",
    is_beyond_trained="beyond_trained_length",
)
encode_context, decode_context = derive(
    Context,
    context_pb.Context,
    ignored=["ttl"],  # input only
    id=_CONTEXT_NAME,
    created="create_time",
    updated="update_time",
    shares="rank_shares",
    expires="expire_time",
    positions="position_info",
    used="last_use_time",
)
_encode_fork, decode_fork = derive(
    ForkContext,
    ingest_pb.ForkContextRequest,
    source=Wire("name", context_name, context_id),
    context=Wire("new_name", context_name, partial(context_id, field="new_name")),
)
derive(SkippedContext, ingest_pb.SkippedContext, name=_CONTEXT_NAME)
encode_recompute, decode_recompute = derive(RecomputeResult, ingest_pb.RecomputeContextsResponse)
encode_ingest_progress, decode_ingest_progress = derive(IngestProgress, ingest_pb.IngestContextResponse)


def decode_contexts(page: ingest_pb.ListContextsResponse) -> tuple[list[Context], str]:
    """The contexts of a page, and the token of the next one."""
    return [decode_context(context) for context in page.contexts], page.next_page_token


def encode_fork(fork: ForkContext) -> ingest_pb.ForkContextRequest:
    """Raises InvalidArgument when a value does not fit its field."""
    try:
        return _encode_fork(fork)
    except (ValueError, TypeError) as error:
        raise InvalidArgument("token_count", str(error)) from None


def encode_update(context: str, settings: ContextSettings) -> ingest_pb.UpdateContextRequest:
    """Raises InvalidArgument when a value does not fit its field."""
    if settings.capacity is not UNSET:
        raise InvalidArgument("capacity", "is fixed when a context is created")
    message = ingest_pb.UpdateContextRequest()
    message.context.name = context_name(context)
    message.update_mask.paths.extend(_encode_settings(settings, message.context))
    return message


def _encode_settings(settings: ContextSettings, message: context_pb.Context | ingest_pb.IngestConfig) -> list[str]:
    """Sets the fields of `message` and returns the names of those that are set."""
    paths: list[str] = []
    try:
        if settings.display_name is not UNSET:
            message.display_name = check_utf8(settings.display_name, "display_name")
            paths.append("display_name")
        if settings.is_pinned is not UNSET:
            message.pinned = settings.is_pinned
            paths.append("pinned")
        if settings.ttl is not UNSET:
            message.ttl.CopyFrom(encode_lifetime(settings.ttl))
            paths.append("ttl")
        if settings.capacity is not UNSET and isinstance(message, ingest_pb.IngestConfig):
            message.capacity_token_count = settings.capacity
        if settings.expires is not UNSET:
            if settings.expires is not None:
                message.expire_time.CopyFrom(encode_time(settings.expires))
            paths.append("expire_time")
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidArgument("settings", str(error)) from None
    return paths


def decode_update(message: ingest_pb.UpdateContextRequest) -> tuple[str, ContextSettings]:
    """The id of the context, and the changed settings. Raises InvalidArgument naming the field."""
    paths = message.update_mask.paths
    if len(paths) > MAX_PATHS:
        raise InvalidArgument("update_mask", f"has {len(paths):,} paths; the limit is {MAX_PATHS}")
    wanted = list(paths) or _given(message.context)
    unknown = next((path for path in wanted if path not in (*_PATHS, "*")), None)
    if unknown is not None:
        raise InvalidArgument("update_mask", f"{unknown[:100]!r} is not one of {', '.join(_PATHS)}, *")
    if "*" in wanted:
        is_ttl = message.context.HasField("ttl") and not message.context.HasField("expire_time")
        wanted = [*_given(message.context), "display_name", "pinned", "ttl" if is_ttl else "expire_time"]
    return context_id(message.context.name, "context.name"), _decode_settings(message.context, wanted, "context")


def _given(message: context_pb.Context | ingest_pb.IngestConfig) -> list[str]:
    """The names of the settings that `message` contains."""
    times = [path for path in ("expire_time", "ttl") if message.HasField(path)]
    names = ["display_name"] if message.display_name else []
    return [*names, *(["pinned"] if message.pinned else []), *times]


def _decode_settings(
    message: context_pb.Context | ingest_pb.IngestConfig, paths: list[str], parent: str
) -> ContextSettings:
    if len(message.display_name) > MAX_DISPLAY_NAME:
        text = f"has {len(message.display_name):,} characters; the limit is {MAX_DISPLAY_NAME}"
        raise InvalidArgument(f"{parent}.display_name", text)
    if {"ttl", "expire_time"} <= set(paths):
        raise InvalidArgument(f"{parent}.ttl", "cannot be given together with expire_time")
    has_ttl = "ttl" in paths and message.HasField("ttl")
    return ContextSettings(
        display_name=message.display_name if "display_name" in paths else UNSET,
        is_pinned=message.pinned if "pinned" in paths else UNSET,
        ttl=_decode_ttl(message.ttl, f"{parent}.ttl") if has_ttl else UNSET,
        expires=UNSET if has_ttl else _decode_expiry(message, paths, parent),
    )


def _decode_expiry(
    message: context_pb.Context | ingest_pb.IngestConfig, paths: list[str], parent: str
) -> float | UnsetType | None:
    if "expire_time" not in paths or not message.HasField("expire_time"):
        return None if {"ttl", "expire_time"} & set(paths) else UNSET
    time = message.expire_time
    if not (0 <= time.nanos < 10**9 and 0 <= time.seconds <= MAX_TIME):
        raise InvalidArgument(f"{parent}.expire_time", "must be between the years 1970 and 9999")
    return decode_seconds(time)


def _decode_ttl(ttl: Duration, field: str) -> float:
    seconds = decode_seconds(ttl)
    if not 0 < seconds <= MAX_TIME or abs(ttl.nanos) >= 10**9:
        raise InvalidArgument(
            field, f"{human_number(seconds)} s must be positive, and is too long if it ends after the year 9999"
        )
    return seconds


def encode_ingest_piece(piece: IngestPiece) -> ingest_pb.IngestContextRequest:
    match piece:
        case IngestHeader():
            config = _encode_header(piece)
            if not piece.system:
                return ingest_pb.IngestContextRequest(config=config)
            system = check_utf8(piece.system, "system")
            prefaced = ingest_pb.PrefacedIngestConfig(config=config, system=system)
            return ingest_pb.IngestContextRequest(prefaced_config=prefaced)
        case bytes():
            return ingest_pb.IngestContextRequest(text=piece)
        case _:
            return ingest_pb.IngestContextRequest(token_ids=encode_ids(piece))


def _encode_header(header: IngestHeader) -> ingest_pb.IngestConfig:
    config = ingest_pb.IngestConfig(
        name=context_name(header.context),
        append=header.append,
        total_size_bytes=header.total_bytes,
        upload_id=check_utf8(header.upload_id, "upload_id"),
    )
    encode_scheduling(header.priority, header.client, config)
    _encode_settings(header.settings, config)
    encode_files(header.files, config)
    return config


def decode_ingest_piece(message: ingest_pb.IngestContextRequest) -> IngestPiece:
    """Raises InvalidArgument naming the field."""
    match message.WhichOneof("payload"):
        case "config":
            return _decode_header(message.config)
        case "prefaced_config":
            return _decode_prefaced(message.prefaced_config)
        case "text":
            return message.text
        case "token_ids":
            return decode_ids(message.token_ids)
        case _:
            raise InvalidArgument("payload", "is missing: give config, prefaced_config, text or token_ids")


def _decode_prefaced(prefaced: ingest_pb.PrefacedIngestConfig) -> IngestHeader:
    header = _decode_header(prefaced.config)
    if header.append:
        raise InvalidArgument("prefaced_config.system", "is only for new contexts: it precedes the document")
    if (size := len(prefaced.system.encode())) > MAX_SYSTEM_BYTES:
        message = f"has {size:,} bytes; the limit is {MAX_SYSTEM_BYTES:,}"
        raise InvalidArgument("prefaced_config.system", message)
    return replace(header, system=prefaced.system)


def _decode_header(config: ingest_pb.IngestConfig) -> IngestHeader:
    capacity = config.capacity_token_count if config.HasField("capacity_token_count") else UNSET
    given = [*_given(config), *(["capacity_token_count"] if capacity is not UNSET else [])]
    if config.append and given:
        raise InvalidArgument(f"config.{given[0]}", "is only for new contexts: use UpdateContext for an existing one")
    if len(config.upload_id) > MAX_UPLOAD_ID:
        raise InvalidArgument(
            "config.upload_id", f"has {len(config.upload_id):,} characters; the limit is {MAX_UPLOAD_ID}"
        )
    priority, client = decode_scheduling(config, "config.")
    if capacity is not UNSET and capacity < 1:
        raise InvalidArgument("config.capacity_token_count", f"{capacity} is not positive")
    return IngestHeader(
        context=context_id(config.name, "config.name"),
        append=config.append,
        total_bytes=config.total_size_bytes if config.HasField("total_size_bytes") else None,
        upload_id=config.upload_id,
        settings=replace(_decode_settings(config, given, "config"), capacity=capacity),
        files=decode_files(config),
        priority=priority,
        client=client,
    )
