from longleaf.v1 import generation_pb2 as _generation_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("context", "text", "token_ids", "use_chat_template", "sampling")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    USE_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    context: str
    text: str
    token_ids: _generation_pb2.TokenIds
    use_chat_template: bool
    sampling: _generation_pb2.SamplingParams
    def __init__(self, context: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., use_chat_template: _Optional[bool] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "progress", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: _generation_pb2.Started
    progress: _generation_pb2.Progress
    delta: _generation_pb2.Delta
    finished: _generation_pb2.Finished
    def __init__(self, started: _Optional[_Union[_generation_pb2.Started, _Mapping]] = ..., progress: _Optional[_Union[_generation_pb2.Progress, _Mapping]] = ..., delta: _Optional[_Union[_generation_pb2.Delta, _Mapping]] = ..., finished: _Optional[_Union[_generation_pb2.Finished, _Mapping]] = ...) -> None: ...
