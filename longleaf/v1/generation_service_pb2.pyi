import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from longleaf.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("context", "text", "token_ids", "conversation", "use_chat_template", "sampling", "sample_count", "request_id", "resume_duration", "resume_token_index", "priority", "client_id", "return_token_bytes", "until_full", "provenance", "hidden", "max_draft_token_count", "chat_template_kwargs", "constraint", "tools", "parse_answer", "single_tool_call", "require_tool_call", "required_tool")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    USE_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_DURATION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FULL_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    PARSE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    SINGLE_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_TOOL_FIELD_NUMBER: _ClassVar[int]
    context: str
    text: str
    token_ids: _generation_pb2.TokenIds
    conversation: _generation_pb2.Conversation
    use_chat_template: bool
    sampling: _generation_pb2.SamplingParams
    sample_count: int
    request_id: str
    resume_duration: _duration_pb2.Duration
    resume_token_index: int
    priority: int
    client_id: str
    return_token_bytes: bool
    until_full: bool
    provenance: _generation_pb2.Provenance
    hidden: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenRange]
    max_draft_token_count: int
    chat_template_kwargs: _struct_pb2.Struct
    constraint: Constraint
    tools: _containers.RepeatedScalarFieldContainer[str]
    parse_answer: bool
    single_tool_call: bool
    require_tool_call: bool
    required_tool: str
    def __init__(self, context: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., conversation: _Optional[_Union[_generation_pb2.Conversation, _Mapping]] = ..., use_chat_template: _Optional[bool] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., sample_count: _Optional[int] = ..., request_id: _Optional[str] = ..., resume_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., resume_token_index: _Optional[int] = ..., priority: _Optional[int] = ..., client_id: _Optional[str] = ..., return_token_bytes: _Optional[bool] = ..., until_full: _Optional[bool] = ..., provenance: _Optional[_Union[_generation_pb2.Provenance, _Mapping]] = ..., hidden: _Optional[_Iterable[_Union[_generation_pb2.TokenRange, _Mapping]]] = ..., max_draft_token_count: _Optional[int] = ..., chat_template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., tools: _Optional[_Iterable[str]] = ..., parse_answer: _Optional[bool] = ..., single_tool_call: _Optional[bool] = ..., require_tool_call: _Optional[bool] = ..., required_tool: _Optional[str] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: _empty_pb2.Empty
    regex: str
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[_Union[_empty_pb2.Empty, _Mapping]] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class CancelGenerationRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "progress", "delta", "finished", "recovering")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    started: _generation_pb2.Started
    progress: _generation_pb2.Progress
    delta: _generation_pb2.Delta
    finished: _generation_pb2.Finished
    recovering: _generation_pb2.Recovering
    def __init__(self, started: _Optional[_Union[_generation_pb2.Started, _Mapping]] = ..., progress: _Optional[_Union[_generation_pb2.Progress, _Mapping]] = ..., delta: _Optional[_Union[_generation_pb2.Delta, _Mapping]] = ..., finished: _Optional[_Union[_generation_pb2.Finished, _Mapping]] = ..., recovering: _Optional[_Union[_generation_pb2.Recovering, _Mapping]] = ...) -> None: ...
