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

class SlotState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOT_STATE_UNSPECIFIED: _ClassVar[SlotState]
    SLOT_STATE_WAITING: _ClassVar[SlotState]
    SLOT_STATE_STARTING: _ClassVar[SlotState]
    SLOT_STATE_REPLACED: _ClassVar[SlotState]
    SLOT_STATE_ABANDONED: _ClassVar[SlotState]
SLOT_STATE_UNSPECIFIED: SlotState
SLOT_STATE_WAITING: SlotState
SLOT_STATE_STARTING: SlotState
SLOT_STATE_REPLACED: SlotState
SLOT_STATE_ABANDONED: SlotState

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchClusterRequest(_message.Message):
    __slots__ = ("min_interval_duration",)
    MIN_INTERVAL_DURATION_FIELD_NUMBER: _ClassVar[int]
    min_interval_duration: _duration_pb2.Duration
    def __init__(self, min_interval_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchClusterResponse(_message.Message):
    __slots__ = ("cluster",)
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    cluster: Cluster
    def __init__(self, cluster: _Optional[_Union[Cluster, _Mapping]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "dtype", "max_context_token_count", "vocabulary_size", "has_chat_template", "rope_type", "long_allowed", "float32_phase_error", "float64_phase_error", "kv_dtype", "quantization")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    ROPE_TYPE_FIELD_NUMBER: _ClassVar[int]
    LONG_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    FLOAT32_PHASE_ERROR_FIELD_NUMBER: _ClassVar[int]
    FLOAT64_PHASE_ERROR_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    dtype: str
    max_context_token_count: int
    vocabulary_size: int
    has_chat_template: bool
    rope_type: str
    long_allowed: bool
    float32_phase_error: float
    float64_phase_error: float
    kv_dtype: str
    quantization: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., max_context_token_count: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., rope_type: _Optional[str] = ..., long_allowed: _Optional[bool] = ..., float32_phase_error: _Optional[float] = ..., float64_phase_error: _Optional[float] = ..., kv_dtype: _Optional[str] = ..., quantization: _Optional[str] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("rank", "node", "pid", "device", "token_count", "max_token_count", "kv_bytes", "max_kv_bytes", "kernels", "address", "weight_bytes", "weight_part_count")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node: str
    pid: int
    device: str
    token_count: int
    max_token_count: int
    kv_bytes: int
    max_kv_bytes: int
    kernels: str
    address: str
    weight_bytes: int
    weight_part_count: int
    def __init__(self, rank: _Optional[int] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., token_count: _Optional[int] = ..., max_token_count: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., max_kv_bytes: _Optional[int] = ..., kernels: _Optional[str] = ..., address: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., weight_part_count: _Optional[int] = ...) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("model", "workers", "world_size", "epoch", "launcher", "merge", "waiting_count", "running_count", "transport", "merge_timings", "exact", "exactness_note", "dequantization", "block_token_count", "window_keys", "window_token_count", "max_window_token_count", "state_count", "max_state_count", "state_bytes", "intra_node_transport", "inter_node_transport", "tier_merges", "recovery", "losses", "storage", "drafting", "missing_weights")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MERGE_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_NOTE_FIELD_NUMBER: _ClassVar[int]
    DEQUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_KEYS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_WINDOW_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_STATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INTRA_NODE_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    INTER_NODE_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TIER_MERGES_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    MISSING_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    world_size: int
    epoch: int
    launcher: str
    merge: str
    waiting_count: int
    running_count: int
    transport: str
    merge_timings: _containers.RepeatedCompositeFieldContainer[MergeTiming]
    exact: bool
    exactness_note: str
    dequantization: str
    block_token_count: int
    window_keys: str
    window_token_count: int
    max_window_token_count: int
    state_count: int
    max_state_count: int
    state_bytes: int
    intra_node_transport: str
    inter_node_transport: str
    tier_merges: _containers.RepeatedCompositeFieldContainer[TierMerge]
    recovery: Recovery
    losses: _containers.RepeatedCompositeFieldContainer[Loss]
    storage: Storage
    drafting: Drafting
    missing_weights: float
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., world_size: _Optional[int] = ..., epoch: _Optional[int] = ..., launcher: _Optional[str] = ..., merge: _Optional[str] = ..., waiting_count: _Optional[int] = ..., running_count: _Optional[int] = ..., transport: _Optional[str] = ..., merge_timings: _Optional[_Iterable[_Union[MergeTiming, _Mapping]]] = ..., exact: _Optional[bool] = ..., exactness_note: _Optional[str] = ..., dequantization: _Optional[str] = ..., block_token_count: _Optional[int] = ..., window_keys: _Optional[str] = ..., window_token_count: _Optional[int] = ..., max_window_token_count: _Optional[int] = ..., state_count: _Optional[int] = ..., max_state_count: _Optional[int] = ..., state_bytes: _Optional[int] = ..., intra_node_transport: _Optional[str] = ..., inter_node_transport: _Optional[str] = ..., tier_merges: _Optional[_Iterable[_Union[TierMerge, _Mapping]]] = ..., recovery: _Optional[_Union[Recovery, _Mapping]] = ..., losses: _Optional[_Iterable[_Union[Loss, _Mapping]]] = ..., storage: _Optional[_Union[Storage, _Mapping]] = ..., drafting: _Optional[_Union[Drafting, _Mapping]] = ..., missing_weights: _Optional[float] = ...) -> None: ...

class Drafting(_message.Message):
    __slots__ = ("drafted_token_count", "accepted_token_count", "tokens_per_step")
    DRAFTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    drafted_token_count: int
    accepted_token_count: int
    tokens_per_step: float
    def __init__(self, drafted_token_count: _Optional[int] = ..., accepted_token_count: _Optional[int] = ..., tokens_per_step: _Optional[float] = ...) -> None: ...

class Storage(_message.Message):
    __slots__ = ("snapshots", "url", "error")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    snapshots: str
    url: str
    error: str
    def __init__(self, snapshots: _Optional[str] = ..., url: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Recovery(_message.Message):
    __slots__ = ("epoch", "lost_token_count", "recovered_token_count", "elapsed_duration", "done", "dropped_contexts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOST_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_DURATION_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lost_token_count: int
    recovered_token_count: int
    elapsed_duration: _duration_pb2.Duration
    done: bool
    dropped_contexts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., lost_token_count: _Optional[int] = ..., recovered_token_count: _Optional[int] = ..., elapsed_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., done: _Optional[bool] = ..., dropped_contexts: _Optional[_Iterable[str]] = ...) -> None: ...

class Loss(_message.Message):
    __slots__ = ("loss_time", "member", "rank", "epoch", "node", "reason", "slot_state", "retry_time", "slot_reason")
    LOSS_TIME_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SLOT_STATE_FIELD_NUMBER: _ClassVar[int]
    RETRY_TIME_FIELD_NUMBER: _ClassVar[int]
    SLOT_REASON_FIELD_NUMBER: _ClassVar[int]
    loss_time: _timestamp_pb2.Timestamp
    member: int
    rank: int
    epoch: int
    node: str
    reason: str
    slot_state: SlotState
    retry_time: _timestamp_pb2.Timestamp
    slot_reason: str
    def __init__(self, loss_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., member: _Optional[int] = ..., rank: _Optional[int] = ..., epoch: _Optional[int] = ..., node: _Optional[str] = ..., reason: _Optional[str] = ..., slot_state: _Optional[_Union[SlotState, str]] = ..., retry_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., slot_reason: _Optional[str] = ...) -> None: ...

class TierMerge(_message.Message):
    __slots__ = ("row_count", "intra_node", "inter_node")
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    INTRA_NODE_FIELD_NUMBER: _ClassVar[int]
    INTER_NODE_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    intra_node: str
    inter_node: str
    def __init__(self, row_count: _Optional[int] = ..., intra_node: _Optional[str] = ..., inter_node: _Optional[str] = ...) -> None: ...

class MergeTiming(_message.Message):
    __slots__ = ("row_count", "merge", "latency_us")
    class LatencyUsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_US_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    merge: str
    latency_us: _containers.ScalarMap[str, float]
    def __init__(self, row_count: _Optional[int] = ..., merge: _Optional[str] = ..., latency_us: _Optional[_Mapping[str, float]] = ...) -> None: ...

class VerifyClusterRequest(_message.Message):
    __slots__ = ("text", "seed", "prompt_token_count", "max_token_count")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    text: str
    seed: int
    prompt_token_count: int
    max_token_count: int
    def __init__(self, text: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_token_count: _Optional[int] = ..., max_token_count: _Optional[int] = ...) -> None: ...

class VerifyClusterResponse(_message.Message):
    __slots__ = ("passed", "max_logit_difference", "tolerance", "max_logit", "dtype", "worst_token_index", "prompt_token_count", "compared_token_count", "equal_token_count", "holding_rank_count", "world_size", "reference_duration", "failure", "distance", "reference_distance", "reference_dtype", "conclusive")
    PASSED_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WORST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPARED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    EQUAL_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    HOLDING_RANK_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_DURATION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_DISTANCE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    passed: bool
    max_logit_difference: float
    tolerance: float
    max_logit: float
    dtype: str
    worst_token_index: int
    prompt_token_count: int
    compared_token_count: int
    equal_token_count: int
    holding_rank_count: int
    world_size: int
    reference_duration: _duration_pb2.Duration
    failure: str
    distance: float
    reference_distance: float
    reference_dtype: str
    conclusive: bool
    def __init__(self, passed: _Optional[bool] = ..., max_logit_difference: _Optional[float] = ..., tolerance: _Optional[float] = ..., max_logit: _Optional[float] = ..., dtype: _Optional[str] = ..., worst_token_index: _Optional[int] = ..., prompt_token_count: _Optional[int] = ..., compared_token_count: _Optional[int] = ..., equal_token_count: _Optional[int] = ..., holding_rank_count: _Optional[int] = ..., world_size: _Optional[int] = ..., reference_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., failure: _Optional[str] = ..., distance: _Optional[float] = ..., reference_distance: _Optional[float] = ..., reference_dtype: _Optional[str] = ..., conclusive: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("wait",)
    WAIT_FIELD_NUMBER: _ClassVar[int]
    wait: bool
    def __init__(self, wait: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("open_call_count", "limit_duration")
    OPEN_CALL_COUNT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    open_call_count: int
    limit_duration: _duration_pb2.Duration
    def __init__(self, open_call_count: _Optional[int] = ..., limit_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ResetSlotsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetSlotsResponse(_message.Message):
    __slots__ = ("slot_count",)
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    slot_count: int
    def __init__(self, slot_count: _Optional[int] = ...) -> None: ...
