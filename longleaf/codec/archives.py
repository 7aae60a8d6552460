"""Conversion of export and import messages."""

from longleaf.codec.context import MAX_UPLOAD_ID, decode_context, encode_context
from longleaf.codec.names import check_utf8, context_id, context_name
from longleaf.errors import InvalidArgument
from longleaf.types import ArchiveChunk, ExportContext, ExportedArchive, ImportHeader, ImportProgress
from longleaf.v1 import context_service_pb2 as context_pb

MAX_DIGEST = 128
"""In characters."""


def encode_export(wanted: ExportContext) -> context_pb.ExportContextRequest:
    return context_pb.ExportContextRequest(
        name=context_name(wanted.context),
        offset=wanted.offset,
        digest=wanted.digest,
        without_keys=not wanted.with_keys,
    )


def decode_export(message: context_pb.ExportContextRequest) -> ExportContext:
    """Raises InvalidArgument naming the field."""
    if message.offset < 0:
        raise InvalidArgument("offset", f"{message.offset} is negative")
    if len(message.digest) > MAX_DIGEST or (message.offset and not message.digest):
        raise InvalidArgument("digest", "is missing or invalid; it is required with an offset")
    return ExportContext(
        context=context_id(message.name),
        offset=message.offset,
        digest=message.digest,
        with_keys=not message.without_keys,
    )


def encode_exported(updates: ExportedArchive | bytes) -> context_pb.ExportContextResponse:
    if isinstance(updates, bytes):
        return context_pb.ExportContextResponse(data=updates)
    message = context_pb.ContextArchive(total_size_bytes=updates.num_bytes, digest=updates.digest)
    return context_pb.ExportContextResponse(archive=message)


def decode_exported(message: context_pb.ExportContextResponse) -> ExportedArchive | bytes:
    """The archive's description, or some of its bytes; empty bytes for a message of a later version."""
    if message.HasField("archive"):
        return ExportedArchive(message.archive.total_size_bytes, message.archive.digest)
    return message.data


def encode_import_piece(piece: ImportHeader | ArchiveChunk) -> context_pb.ImportContextRequest:
    if isinstance(piece, ArchiveChunk):
        message = context_pb.ArchiveChunk(offset=piece.offset, data=piece.data)
        return context_pb.ImportContextRequest(chunk=message)
    config = context_pb.ImportConfig(
        name="" if piece.context is None else context_name(piece.context),
        upload_id=check_utf8(piece.upload_id, "upload_id"),
        total_size_bytes=piece.total_bytes,
    )
    return context_pb.ImportContextRequest(config=config)


def decode_import_piece(message: context_pb.ImportContextRequest) -> ImportHeader | ArchiveChunk:
    """Raises InvalidArgument naming the field."""
    match message.WhichOneof("payload"):
        case "config":
            return _decode_header(message.config)
        case "chunk":
            return ArchiveChunk(message.chunk.offset, message.chunk.data)
        case _:
            raise InvalidArgument("payload", "is missing: give config or a chunk")


def _decode_header(config: context_pb.ImportConfig) -> ImportHeader:
    if len(config.upload_id) > MAX_UPLOAD_ID:
        message = f"has {len(config.upload_id):,} characters; the limit is {MAX_UPLOAD_ID}"
        raise InvalidArgument("config.upload_id", message)
    if config.total_size_bytes < 0:
        raise InvalidArgument("config.total_size_bytes", f"{config.total_size_bytes} is negative")
    return ImportHeader(
        context=context_id(config.name, "config.name") if config.name else None,
        upload_id=config.upload_id,
        total_bytes=config.total_size_bytes if config.HasField("total_size_bytes") else None,
    )


def encode_import_progress(progress: ImportProgress) -> context_pb.ImportContextResponse:
    return context_pb.ImportContextResponse(
        received_size_bytes=progress.received_bytes,
        context=encode_context(progress.context) if progress.context else None,
        key_token_count=progress.key_tokens,
    )


def decode_import_progress(message: context_pb.ImportContextResponse) -> ImportProgress:
    return ImportProgress(
        received_bytes=message.received_size_bytes,
        context=decode_context(message.context) if message.HasField("context") else None,
        key_tokens=message.key_token_count if message.HasField("key_token_count") else None,
    )
