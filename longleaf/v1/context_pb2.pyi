import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ContextState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTEXT_STATE_UNSPECIFIED: _ClassVar[ContextState]
    CONTEXT_STATE_RESIDENT: _ClassVar[ContextState]
    CONTEXT_STATE_EVICTED: _ClassVar[ContextState]
    CONTEXT_STATE_RESTORING: _ClassVar[ContextState]
CONTEXT_STATE_UNSPECIFIED: ContextState
CONTEXT_STATE_RESIDENT: ContextState
CONTEXT_STATE_EVICTED: ContextState
CONTEXT_STATE_RESTORING: ContextState

class Context(_message.Message):
    __slots__ = ("name", "token_count", "kv_bytes", "create_time", "update_time", "rank_shares", "display_name", "expire_time", "pinned", "ttl", "position_info", "exact", "exactness_note", "dequantization", "state", "storage_bytes", "last_use_time", "hit_count", "recomputed_token_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    RANK_SHARES_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    POSITION_INFO_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_NOTE_FIELD_NUMBER: _ClassVar[int]
    DEQUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_TIME_FIELD_NUMBER: _ClassVar[int]
    HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    token_count: int
    kv_bytes: int
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    rank_shares: _containers.RepeatedCompositeFieldContainer[RankShare]
    display_name: str
    expire_time: _timestamp_pb2.Timestamp
    pinned: bool
    ttl: _duration_pb2.Duration
    position_info: PositionInfo
    exact: bool
    exactness_note: str
    dequantization: str
    state: ContextState
    storage_bytes: int
    last_use_time: _timestamp_pb2.Timestamp
    hit_count: int
    recomputed_token_count: int
    def __init__(self, name: _Optional[str] = ..., token_count: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., rank_shares: _Optional[_Iterable[_Union[RankShare, _Mapping]]] = ..., display_name: _Optional[str] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., pinned: _Optional[bool] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., position_info: _Optional[_Union[PositionInfo, _Mapping]] = ..., exact: _Optional[bool] = ..., exactness_note: _Optional[str] = ..., dequantization: _Optional[str] = ..., state: _Optional[_Union[ContextState, str]] = ..., storage_bytes: _Optional[int] = ..., last_use_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., hit_count: _Optional[int] = ..., recomputed_token_count: _Optional[int] = ...) -> None: ...

class PositionInfo(_message.Message):
    __slots__ = ("capacity_token_count", "rope_type", "precision", "scaled_token_count", "phase_error", "beyond_trained_length")
    CAPACITY_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROPE_TYPE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    SCALED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PHASE_ERROR_FIELD_NUMBER: _ClassVar[int]
    BEYOND_TRAINED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    capacity_token_count: int
    rope_type: str
    precision: str
    scaled_token_count: int
    phase_error: float
    beyond_trained_length: bool
    def __init__(self, capacity_token_count: _Optional[int] = ..., rope_type: _Optional[str] = ..., precision: _Optional[str] = ..., scaled_token_count: _Optional[int] = ..., phase_error: _Optional[float] = ..., beyond_trained_length: _Optional[bool] = ...) -> None: ...

class RankShare(_message.Message):
    __slots__ = ("rank", "token_count", "kv_bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    token_count: int
    kv_bytes: int
    def __init__(self, rank: _Optional[int] = ..., token_count: _Optional[int] = ..., kv_bytes: _Optional[int] = ...) -> None: ...
