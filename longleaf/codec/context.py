"""Conversion of contexts and ingests."""

from typing import get_args

from google.protobuf.duration_pb2 import Duration
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from longleaf.codec.context_text import decode_files, encode_files
from longleaf.codec.generation import decode_recovering, encode_recovering
from longleaf.codec.names import check_utf8, context_id, context_name, decode_ids, encode_ids, enum_value
from longleaf.codec.scheduling_options import decode_claim, encode_claim
from longleaf.codec.times import decode_seconds, encode_lifetime, encode_time
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_number
from longleaf.types import (
    MAX_TIME,
    Context,
    ContextSettings,
    ContextState,
    ForkContext,
    IngestHeader,
    IngestPhase,
    IngestPiece,
    IngestProgress,
    PositionInfo,
    Precision,
    RankShare,
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
_PHASES: tuple[IngestPhase, ...] = get_args(IngestPhase)
"""Indexed by enum number."""
_STATES: tuple[ContextState, ...] = get_args(ContextState)
"""Indexed by enum number."""
_PRECISIONS: dict[str, Precision] = {name: name for name in get_args(Precision)}
_PATHS = ("display_name", "pinned", "expire_time", "ttl")


def encode_context(context: Context) -> context_pb.Context:
    return context_pb.Context(
        name=context_name(context.id),
        token_count=context.tokens,
        kv_bytes=context.kv_bytes,
        create_time=encode_time(context.created),
        update_time=encode_time(context.updated),
        rank_shares=[
            context_pb.RankShare(rank=share.rank, token_count=share.tokens, kv_bytes=share.kv_bytes)
            for share in context.shares
        ],
        display_name=context.display_name,
        expire_time=None if context.expires is None else encode_time(context.expires),
        pinned=context.is_pinned,
        position_info=_encode_positions(context.positions),
        exact=context.is_exact,
        exactness_note=context.exactness_note,
        state=_STATES.index(context.state),  # pyright: ignore[reportArgumentType]
        storage_bytes=context.storage_bytes,
        last_use_time=encode_time(context.used),
        hit_count=context.hits,
    )


def _encode_positions(positions: PositionInfo) -> context_pb.PositionInfo:
    return context_pb.PositionInfo(
        capacity_token_count=positions.capacity,
        rope_type=positions.rope,
        precision=positions.precision,
        scaled_token_count=positions.scaled_for,
        phase_error=positions.phase_error,
        beyond_trained_length=positions.is_beyond_trained,
    )


def decode_contexts(page: ingest_pb.ListContextsResponse) -> tuple[list[Context], str]:
    """The contexts of a page, and the token of the next one."""
    return [decode_context(context) for context in page.contexts], page.next_page_token


def decode_context(message: context_pb.Context) -> Context:
    return Context(
        id=message.name.removeprefix("contexts/"),
        tokens=message.token_count,
        kv_bytes=message.kv_bytes,
        created=decode_seconds(message.create_time),
        updated=decode_seconds(message.update_time),
        shares=tuple(RankShare(share.rank, share.token_count, share.kv_bytes) for share in message.rank_shares),
        display_name=message.display_name,
        expires=decode_seconds(message.expire_time) if message.HasField("expire_time") else None,
        is_pinned=message.pinned,
        positions=_decode_positions(message.position_info),
        is_exact=message.exact,
        exactness_note=message.exactness_note,
        state=enum_value(_STATES, message.state),
        storage_bytes=message.storage_bytes,
        used=decode_seconds(message.last_use_time),
        hits=message.hit_count,
    )


def _decode_positions(message: context_pb.PositionInfo) -> PositionInfo:
    return PositionInfo(
        capacity=message.capacity_token_count,
        rope=message.rope_type,
        precision=_PRECISIONS.get(message.precision, "unspecified"),
        scaled_for=message.scaled_token_count,
        phase_error=message.phase_error,
        is_beyond_trained=message.beyond_trained_length,
    )


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


def encode_recompute(recomputed: RecomputeResult) -> ingest_pb.RereadContextsResponse:
    left_out = (
        ingest_pb.LeftOutContext(name=context_name(each.name), reason=each.reason) for each in recomputed.left_out
    )
    return ingest_pb.RereadContextsResponse(contexts=map(encode_context, recomputed.contexts), left_out=left_out)


def decode_recompute(message: ingest_pb.RereadContextsResponse) -> RecomputeResult:
    return RecomputeResult(
        contexts=tuple(map(decode_context, message.contexts)),
        left_out=tuple(SkippedContext(each.name.removeprefix("contexts/"), each.reason) for each in message.left_out),
    )


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
    encode_claim(header.priority, header.client, config)
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
    priority, client = decode_claim(config, "config.")
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


def encode_ingest_progress(progress: IngestProgress) -> ingest_pb.IngestContextResponse:
    return ingest_pb.IngestContextResponse(
        phase=ingest_pb.IngestPhase.Name(_PHASES.index(progress.phase)),
        received_size_bytes=progress.received_bytes,
        received_token_count=progress.received_tokens,
        processed_token_count=progress.processed,
        total_token_count=progress.total,
        tokens_per_second=progress.tokens_per_second,
        context=encode_context(progress.context) if progress.context else None,
        recovering=encode_recovering(progress.recovering) if progress.recovering else None,
    )


def decode_ingest_progress(message: ingest_pb.IngestContextResponse) -> IngestProgress:
    return IngestProgress(
        phase=enum_value(_PHASES, message.phase),
        received_bytes=message.received_size_bytes,
        received_tokens=message.received_token_count,
        processed=message.processed_token_count,
        total=message.total_token_count,
        tokens_per_second=message.tokens_per_second,
        context=decode_context(message.context) if message.HasField("context") else None,
        recovering=decode_recovering(message.recovering) if message.HasField("recovering") else None,
    )
