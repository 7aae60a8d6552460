import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_END_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]

class Ranking(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANKING_UNSPECIFIED: _ClassVar[Ranking]
    RANKING_RAW: _ClassVar[Ranking]
    RANKING_CONTRAST: _ClassVar[Ranking]
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
ROLE_TOOL: Role
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_END_TOKEN: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
RANKING_UNSPECIFIED: Ranking
RANKING_RAW: Ranking
RANKING_CONTRAST: Ranking

class SamplingParams(_message.Message):
    __slots__ = ("max_token_count", "temperature", "top_k", "top_p", "seed", "stop", "ignore_end_token", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "logprob_count")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_COUNT_FIELD_NUMBER: _ClassVar[int]
    max_token_count: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_end_token: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob_count: int
    def __init__(self, max_token_count: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_end_token: _Optional[bool] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprob_count: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "parts", "reasoning", "tool_calls", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: Role
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_token_count", "cached_token_count", "completion_token_count", "drafted_token_count", "accepted_token_count", "reasoning_token_count")
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    prompt_token_count: int
    cached_token_count: int
    completion_token_count: int
    drafted_token_count: int
    accepted_token_count: int
    reasoning_token_count: int
    def __init__(self, prompt_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., completion_token_count: _Optional[int] = ..., drafted_token_count: _Optional[int] = ..., accepted_token_count: _Optional[int] = ..., reasoning_token_count: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_duration", "first_token_duration", "decode_duration", "prefill_duration")
    QUEUE_DURATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_DURATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_DURATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DURATION_FIELD_NUMBER: _ClassVar[int]
    queue_duration: _duration_pb2.Duration
    first_token_duration: _duration_pb2.Duration
    decode_duration: _duration_pb2.Duration
    prefill_duration: _duration_pb2.Duration
    def __init__(self, queue_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_token_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("prompt_token_count", "cached_token_count", "queue_position", "request_id", "beyond_trained_length", "exact", "exactness_note", "dequantization", "warnings")
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BEYOND_TRAINED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_NOTE_FIELD_NUMBER: _ClassVar[int]
    DEQUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_count: int
    cached_token_count: int
    queue_position: int
    request_id: str
    beyond_trained_length: bool
    exact: bool
    exactness_note: str
    dequantization: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompt_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., queue_position: _Optional[int] = ..., request_id: _Optional[str] = ..., beyond_trained_length: _Optional[bool] = ..., exact: _Optional[bool] = ..., exactness_note: _Optional[str] = ..., dequantization: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("processed_token_count", "total_token_count")
    PROCESSED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    processed_token_count: int
    total_token_count: int
    def __init__(self, processed_token_count: _Optional[int] = ..., total_token_count: _Optional[int] = ...) -> None: ...

class Recovering(_message.Message):
    __slots__ = ("lost_token_count", "recovered_token_count", "total_token_count", "missing_weights")
    LOST_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISSING_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    lost_token_count: int
    recovered_token_count: int
    total_token_count: int
    missing_weights: float
    def __init__(self, lost_token_count: _Optional[int] = ..., recovered_token_count: _Optional[int] = ..., total_token_count: _Optional[int] = ..., missing_weights: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "token_bytes")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    token_bytes: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprob", "top", "token_bytes")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    token_bytes: bytes
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("span_token_count", "span_count", "layers", "per_token", "ranking", "confirm")
    SPAN_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SPAN_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RANKING_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    span_token_count: int
    span_count: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    per_token: bool
    ranking: Ranking
    confirm: bool
    def __init__(self, span_token_count: _Optional[int] = ..., span_count: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., per_token: _Optional[bool] = ..., ranking: _Optional[_Union[Ranking, str]] = ..., confirm: _Optional[bool] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("token_start", "token_end")
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    token_start: int
    token_end: int
    def __init__(self, token_start: _Optional[int] = ..., token_end: _Optional[int] = ...) -> None: ...

class ByteRange(_message.Message):
    __slots__ = ("byte_start", "byte_end")
    BYTE_START_FIELD_NUMBER: _ClassVar[int]
    BYTE_END_FIELD_NUMBER: _ClassVar[int]
    byte_start: int
    byte_end: int
    def __init__(self, byte_start: _Optional[int] = ..., byte_end: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("token_start", "token_end", "share", "largest_share", "largest_layer", "largest_head", "contrast", "drop", "bytes", "file", "last_file")
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    LARGEST_SHARE_FIELD_NUMBER: _ClassVar[int]
    LARGEST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LARGEST_HEAD_FIELD_NUMBER: _ClassVar[int]
    CONTRAST_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    LAST_FILE_FIELD_NUMBER: _ClassVar[int]
    token_start: int
    token_end: int
    share: float
    largest_share: float
    largest_layer: int
    largest_head: int
    contrast: float
    drop: float
    bytes: ByteRange
    file: str
    last_file: str
    def __init__(self, token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., share: _Optional[float] = ..., largest_share: _Optional[float] = ..., largest_layer: _Optional[int] = ..., largest_head: _Optional[int] = ..., contrast: _Optional[float] = ..., drop: _Optional[float] = ..., bytes: _Optional[_Union[ByteRange, _Mapping]] = ..., file: _Optional[str] = ..., last_file: _Optional[str] = ...) -> None: ...

class Attribution(_message.Message):
    __slots__ = ("sources", "context_share", "prompt_share", "answer_share", "sink_share", "token_count", "opening_share")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_SHARE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHARE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_SHARE_FIELD_NUMBER: _ClassVar[int]
    SINK_SHARE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPENING_SHARE_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    context_share: float
    prompt_share: float
    answer_share: float
    sink_share: float
    token_count: int
    opening_share: float
    def __init__(self, sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., context_share: _Optional[float] = ..., prompt_share: _Optional[float] = ..., answer_share: _Optional[float] = ..., sink_share: _Optional[float] = ..., token_count: _Optional[int] = ..., opening_share: _Optional[float] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("token_index", "token_ids", "text", "logprobs", "sample_index", "attribution", "reasoning", "tool_calls")
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    token_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    sample_index: int
    attribution: Attribution
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    def __init__(self, token_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., sample_index: _Optional[int] = ..., attribution: _Optional[_Union[Attribution, _Mapping]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "matched_stop", "usage", "timings", "sample_index", "exact", "exactness_note", "dequantization", "attribution")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_NOTE_FIELD_NUMBER: _ClassVar[int]
    DEQUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    matched_stop: str
    usage: Usage
    timings: Timings
    sample_index: int
    exact: bool
    exactness_note: str
    dequantization: str
    attribution: Attribution
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., matched_stop: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., sample_index: _Optional[int] = ..., exact: _Optional[bool] = ..., exactness_note: _Optional[str] = ..., dequantization: _Optional[str] = ..., attribution: _Optional[_Union[Attribution, _Mapping]] = ...) -> None: ...
