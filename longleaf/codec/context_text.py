"""Conversion of context text and its files."""

from collections.abc import Sequence

from longleaf.codec.derived import derive
from longleaf.codec.names import check_utf8, context_id, context_name
from longleaf.document_text import MAX_FILES, TextFile, check_files
from longleaf.errors import InvalidArgument
from longleaf.types import ContextText, GetContextText, TextUnit
from longleaf.v1 import context_service_pb2 as ingest_pb

_RANGES: dict[TextUnit, str] = {"tokens": "token_range", "bytes": "byte_range"}


def encode_files(files: Sequence[TextFile], config: ingest_pb.IngestConfig) -> None:
    """Raises InvalidArgument when a value does not fit its field."""
    try:
        for file in files:
            config.files.add(name=check_utf8(file.name, "files"), byte_start=file.start)
    except (ValueError, TypeError) as error:
        raise InvalidArgument("files", str(error)) from None


def decode_files(config: ingest_pb.IngestConfig) -> tuple[TextFile, ...]:
    """Raises InvalidArgument naming the field."""
    if len(config.files) > MAX_FILES:  # before iterating over all
        raise InvalidArgument("config.files", f"has {len(config.files):,} entries; the limit is {MAX_FILES:,}")
    files = tuple(TextFile(file.name, file.byte_start) for file in config.files)
    check_files(files, "config.files")
    return files


def encode_get_text(wanted: GetContextText) -> ingest_pb.GetContextTextRequest:
    """Raises InvalidArgument when a value does not fit its field."""
    field = _RANGES[wanted.unit]
    try:
        text_range = ingest_pb.TextRange(start=wanted.start, end=wanted.end)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(field, str(error)) from None
    message = ingest_pb.GetContextTextRequest(name=context_name(wanted.context))
    getattr(message, field).CopyFrom(text_range)
    return message


def decode_get_text(message: ingest_pb.GetContextTextRequest) -> GetContextText:
    """Raises InvalidArgument naming the field."""
    context = context_id(message.name)
    match message.WhichOneof("range"):
        case "token_range":
            return GetContextText(context, "tokens", message.token_range.start, message.token_range.end)
        case "byte_range":
            return GetContextText(context, "bytes", message.byte_range.start, message.byte_range.end)
        case _:
            raise InvalidArgument("range", "is missing: give token_range or byte_range")


encode_context_text, decode_context_text = derive(ContextText, ingest_pb.GetContextTextResponse, line="line_start")
