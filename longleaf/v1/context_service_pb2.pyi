import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from longleaf.v1 import context_pb2 as _context_pb2
from longleaf.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IngestPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INGEST_PHASE_UNSPECIFIED: _ClassVar[IngestPhase]
    INGEST_PHASE_RECEIVING: _ClassVar[IngestPhase]
    INGEST_PHASE_TOKENIZING: _ClassVar[IngestPhase]
    INGEST_PHASE_PREFILLING: _ClassVar[IngestPhase]
    INGEST_PHASE_READY: _ClassVar[IngestPhase]
    INGEST_PHASE_RECOVERING: _ClassVar[IngestPhase]
INGEST_PHASE_UNSPECIFIED: IngestPhase
INGEST_PHASE_RECEIVING: IngestPhase
INGEST_PHASE_TOKENIZING: IngestPhase
INGEST_PHASE_PREFILLING: IngestPhase
INGEST_PHASE_READY: IngestPhase
INGEST_PHASE_RECOVERING: IngestPhase

class IngestConfig(_message.Message):
    __slots__ = ("name", "append", "total_size_bytes", "upload_id", "priority", "client_id", "display_name", "expire_time", "ttl", "pinned", "capacity_token_count", "files")
    NAME_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    name: str
    append: bool
    total_size_bytes: int
    upload_id: str
    priority: int
    client_id: str
    display_name: str
    expire_time: _timestamp_pb2.Timestamp
    ttl: _duration_pb2.Duration
    pinned: bool
    capacity_token_count: int
    files: _containers.RepeatedCompositeFieldContainer[IngestFile]
    def __init__(self, name: _Optional[str] = ..., append: _Optional[bool] = ..., total_size_bytes: _Optional[int] = ..., upload_id: _Optional[str] = ..., priority: _Optional[int] = ..., client_id: _Optional[str] = ..., display_name: _Optional[str] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pinned: _Optional[bool] = ..., capacity_token_count: _Optional[int] = ..., files: _Optional[_Iterable[_Union[IngestFile, _Mapping]]] = ...) -> None: ...

class IngestFile(_message.Message):
    __slots__ = ("name", "byte_start")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTE_START_FIELD_NUMBER: _ClassVar[int]
    name: str
    byte_start: int
    def __init__(self, name: _Optional[str] = ..., byte_start: _Optional[int] = ...) -> None: ...

class PrefacedIngestConfig(_message.Message):
    __slots__ = ("config", "system")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    config: IngestConfig
    system: str
    def __init__(self, config: _Optional[_Union[IngestConfig, _Mapping]] = ..., system: _Optional[str] = ...) -> None: ...

class IngestContextRequest(_message.Message):
    __slots__ = ("config", "text", "token_ids", "prefaced_config")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFACED_CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: IngestConfig
    text: bytes
    token_ids: _generation_pb2.TokenIds
    prefaced_config: PrefacedIngestConfig
    def __init__(self, config: _Optional[_Union[IngestConfig, _Mapping]] = ..., text: _Optional[bytes] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., prefaced_config: _Optional[_Union[PrefacedIngestConfig, _Mapping]] = ...) -> None: ...

class IngestContextResponse(_message.Message):
    __slots__ = ("phase", "received_size_bytes", "processed_token_count", "total_token_count", "tokens_per_second", "context", "received_token_count", "recovering")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    phase: IngestPhase
    received_size_bytes: int
    processed_token_count: int
    total_token_count: int
    tokens_per_second: float
    context: _context_pb2.Context
    received_token_count: int
    recovering: _generation_pb2.Recovering
    def __init__(self, phase: _Optional[_Union[IngestPhase, str]] = ..., received_size_bytes: _Optional[int] = ..., processed_token_count: _Optional[int] = ..., total_token_count: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., context: _Optional[_Union[_context_pb2.Context, _Mapping]] = ..., received_token_count: _Optional[int] = ..., recovering: _Optional[_Union[_generation_pb2.Recovering, _Mapping]] = ...) -> None: ...

class GetContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetContextTextRequest(_message.Message):
    __slots__ = ("name", "token_range", "byte_range")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_RANGE_FIELD_NUMBER: _ClassVar[int]
    BYTE_RANGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    token_range: TextRange
    byte_range: TextRange
    def __init__(self, name: _Optional[str] = ..., token_range: _Optional[_Union[TextRange, _Mapping]] = ..., byte_range: _Optional[_Union[TextRange, _Mapping]] = ...) -> None: ...

class TextRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class GetContextTextResponse(_message.Message):
    __slots__ = ("text", "byte_start", "byte_end", "token_start", "token_end", "file", "line_start", "last_file")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BYTE_START_FIELD_NUMBER: _ClassVar[int]
    BYTE_END_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    LINE_START_FIELD_NUMBER: _ClassVar[int]
    LAST_FILE_FIELD_NUMBER: _ClassVar[int]
    text: str
    byte_start: int
    byte_end: int
    token_start: int
    token_end: int
    file: str
    line_start: int
    last_file: str
    def __init__(self, text: _Optional[str] = ..., byte_start: _Optional[int] = ..., byte_end: _Optional[int] = ..., token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., file: _Optional[str] = ..., line_start: _Optional[int] = ..., last_file: _Optional[str] = ...) -> None: ...

class ListContextsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListContextsResponse(_message.Message):
    __slots__ = ("contexts", "next_page_token")
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    contexts: _containers.RepeatedCompositeFieldContainer[_context_pb2.Context]
    next_page_token: str
    def __init__(self, contexts: _Optional[_Iterable[_Union[_context_pb2.Context, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ForkContextRequest(_message.Message):
    __slots__ = ("name", "new_name", "token_count", "recompute")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NEW_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    name: str
    new_name: str
    token_count: int
    recompute: bool
    def __init__(self, name: _Optional[str] = ..., new_name: _Optional[str] = ..., token_count: _Optional[int] = ..., recompute: _Optional[bool] = ...) -> None: ...

class UpdateContextRequest(_message.Message):
    __slots__ = ("context", "update_mask")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    context: _context_pb2.Context
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, context: _Optional[_Union[_context_pb2.Context, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class RecomputeContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RecomputeContextsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SkippedContext(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RecomputeContextsResponse(_message.Message):
    __slots__ = ("contexts", "skipped")
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    contexts: _containers.RepeatedCompositeFieldContainer[_context_pb2.Context]
    skipped: _containers.RepeatedCompositeFieldContainer[SkippedContext]
    def __init__(self, contexts: _Optional[_Iterable[_Union[_context_pb2.Context, _Mapping]]] = ..., skipped: _Optional[_Iterable[_Union[SkippedContext, _Mapping]]] = ...) -> None: ...

class DeleteContextRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CancelIngestRequest(_message.Message):
    __slots__ = ("name", "upload_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    upload_id: str
    def __init__(self, name: _Optional[str] = ..., upload_id: _Optional[str] = ...) -> None: ...

class ExportContextRequest(_message.Message):
    __slots__ = ("name", "offset", "digest", "without_keys")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_KEYS_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    digest: str
    without_keys: bool
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., digest: _Optional[str] = ..., without_keys: _Optional[bool] = ...) -> None: ...

class ExportContextResponse(_message.Message):
    __slots__ = ("archive", "data")
    ARCHIVE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    archive: ContextArchive
    data: bytes
    def __init__(self, archive: _Optional[_Union[ContextArchive, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ContextArchive(_message.Message):
    __slots__ = ("total_size_bytes", "digest")
    TOTAL_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    total_size_bytes: int
    digest: str
    def __init__(self, total_size_bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class ImportConfig(_message.Message):
    __slots__ = ("name", "upload_id", "total_size_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    upload_id: str
    total_size_bytes: int
    def __init__(self, name: _Optional[str] = ..., upload_id: _Optional[str] = ..., total_size_bytes: _Optional[int] = ...) -> None: ...

class ArchiveChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ImportContextRequest(_message.Message):
    __slots__ = ("config", "chunk")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    config: ImportConfig
    chunk: ArchiveChunk
    def __init__(self, config: _Optional[_Union[ImportConfig, _Mapping]] = ..., chunk: _Optional[_Union[ArchiveChunk, _Mapping]] = ...) -> None: ...

class ImportContextResponse(_message.Message):
    __slots__ = ("received_size_bytes", "context", "key_token_count")
    RECEIVED_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    KEY_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    received_size_bytes: int
    context: _context_pb2.Context
    key_token_count: int
    def __init__(self, received_size_bytes: _Optional[int] = ..., context: _Optional[_Union[_context_pb2.Context, _Mapping]] = ..., key_token_count: _Optional[int] = ...) -> None: ...
