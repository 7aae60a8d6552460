"""Conversion of export and import messages."""

from functools import partial
from operator import not_

from longleaf.codec.context import MAX_UPLOAD_ID
from longleaf.codec.derived import Wire, derive, derive_union
from longleaf.codec.names import check_utf8, context_id, context_name
from longleaf.errors import InvalidArgument
from longleaf.types import ArchiveChunk, ExportContext, ExportedArchive, ImportHeader, ImportProgress
from longleaf.v1 import context_service_pb2 as context_pb

MAX_DIGEST = 128
"""In characters."""


encode_export, _decode_export = derive(
    ExportContext,
    context_pb.ExportContextRequest,
    context=Wire("name", context_name, context_id),
    with_keys=Wire("without_keys", not_, not_),
)
derive(ExportedArchive, context_pb.ContextArchive, num_bytes="total_size_bytes")
encode_exported, _decode_exported = derive_union(context_pb.ExportContextResponse, "payload", ExportedArchive, bytes)
derive(ArchiveChunk, context_pb.ArchiveChunk)
derive(
    ImportHeader,
    context_pb.ImportConfig,
    context=Wire("name", context_name, partial(context_id, field="config.name")),
    upload_id=Wire("upload_id", partial(check_utf8, field="upload_id")),
    tenant=None,
)
encode_import_piece, _decode_import_piece = derive_union(
    context_pb.ImportContextRequest, "payload", ImportHeader, ArchiveChunk
)
encode_import_progress, decode_import_progress = derive(
    ImportProgress, context_pb.ImportContextResponse, key_tokens="key_token_count"
)


def decode_export(message: context_pb.ExportContextRequest) -> ExportContext:
    """Raises InvalidArgument naming the field."""
    if message.offset < 0:
        raise InvalidArgument("offset", f"{message.offset} is negative")
    if len(message.digest) > MAX_DIGEST or (message.offset and not message.digest):
        raise InvalidArgument("digest", "is missing or invalid; it is required with an offset")
    return _decode_export(message)


def decode_exported(message: context_pb.ExportContextResponse) -> ExportedArchive | bytes:
    """The archive's description, or some of its bytes; empty bytes for a message of a later version."""
    return _decode_exported(message) or b""


def decode_import_piece(message: context_pb.ImportContextRequest) -> ImportHeader | ArchiveChunk:
    """Raises InvalidArgument naming the field."""
    config = message.config
    if len(config.upload_id) > MAX_UPLOAD_ID:
        text = f"has {len(config.upload_id):,} characters; the limit is {MAX_UPLOAD_ID}"
        raise InvalidArgument("config.upload_id", text)
    if config.total_size_bytes < 0:
        raise InvalidArgument("config.total_size_bytes", f"{config.total_size_bytes} is negative")
    piece = _decode_import_piece(message)
    if piece is None:
        raise InvalidArgument("payload", "is missing: give config or a chunk")
    return piece
