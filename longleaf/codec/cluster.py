"""The cluster. Its structs name the fields in the order and with the meaning of the messages, but shorter."""

from typing import get_args

from longleaf.codec.names import context_name, enum_value, to_text
from longleaf.codec.times import decode_seconds, encode_measured, encode_time
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_number, human_seconds
from longleaf.rank_protocol.group_messages import MergeTiming, TierMerge
from longleaf.types import (
    Cluster,
    Drafting,
    Draining,
    Loss,
    ModelInfo,
    Recovery,
    SlotState,
    Storage,
    Verification,
    Verify,
    Worker,
)
from longleaf.v1 import cluster_service_pb2 as cluster_pb

DEFAULT_INTERVAL = 1.0
MIN_INTERVAL, MAX_INTERVAL = 0.01, 3600.0

_MODEL_NAMES = {
    "max_context_token_count": "max_context_tokens",
    "rope_type": "rope",
    "long_allowed": "is_long_allowed",
}
_WORKER_NAMES = {"token_count": "tokens", "max_token_count": "max_tokens"}
_VERIFICATION_NAMES = {
    "max_logit_difference": "max_difference",
    "worst_token_index": "worst_index",
    "prompt_token_count": "prompt_tokens",
    "compared_token_count": "compared_tokens",
    "equal_token_count": "equal_tokens",
    "holding_rank_count": "holding_ranks",
    "conclusive": "is_conclusive",
}
MAX_SEED = 2**64 - 1
_SLOT_STATES: tuple[SlotState, ...] = get_args(SlotState)
"""By their numbers."""


def encode_cluster(cluster: Cluster) -> cluster_pb.Cluster:
    model, descriptor = cluster.model, cluster_pb.ModelInfo.DESCRIPTOR
    return cluster_pb.Cluster(
        model=cluster_pb.ModelInfo(
            **{field: getattr(model, _MODEL_NAMES.get(field, field)) for field in descriptor.fields_by_name}
        ),
        workers=[_encode_worker(worker) for worker in cluster.workers],
        world_size=cluster.world_size,
        epoch=cluster.epoch,
        launcher=cluster.launcher,
        merge=cluster.merge,
        transport=cluster.transport,
        merge_timings=[
            cluster_pb.MergeTiming(row_count=timing.rows, merge=timing.merge, latency_us=timing.microseconds)
            for timing in cluster.merge_timings
        ],
        waiting_count=cluster.waiting,
        running_count=cluster.running,
        block_token_count=cluster.block_size,
        exact=cluster.is_exact,
        exactness_note=cluster.exactness_note,
        window_keys=cluster.window_keys,
        window_token_count=cluster.window_tokens,
        max_window_token_count=cluster.max_window_tokens,
        intra_node_transport=cluster.intra_node_transport,
        inter_node_transport=cluster.inter_node_transport,
        tier_merges=[
            cluster_pb.TierMerge(row_count=tier.rows, intra_node=tier.intra_node, inter_node=tier.inter_node)
            for tier in cluster.tier_merges
        ],
        recovery=None if cluster.recovery is None else _encode_recovery(cluster.recovery),
        losses=[_encode_loss(loss) for loss in cluster.losses],
        storage=None if cluster.storage is None else _encode_storage(cluster.storage),
        drafting=None if cluster.drafting is None else _encode_drafting(cluster.drafting),
    )


def _encode_worker(worker: Worker) -> cluster_pb.Worker:
    fields = cluster_pb.Worker.DESCRIPTOR.fields_by_name
    return cluster_pb.Worker(**{field: getattr(worker, _WORKER_NAMES.get(field, field)) for field in fields})


def _encode_recovery(recovery: Recovery) -> cluster_pb.Recovery:
    return cluster_pb.Recovery(
        epoch=recovery.epoch,
        lost_token_count=recovery.lost_tokens,
        recovered_token_count=recovery.recovered_tokens,
        elapsed_duration=encode_measured(recovery.seconds),
        done=recovery.is_done,
        dropped_contexts=map(context_name, recovery.dropped_contexts),
    )


def _encode_storage(storage: Storage) -> cluster_pb.Storage:
    return cluster_pb.Storage(snapshots=storage.snapshots, url=storage.url, error=storage.error)


def _encode_drafting(drafting: Drafting) -> cluster_pb.Drafting:
    return cluster_pb.Drafting(
        drafted_token_count=drafting.drafted_tokens,
        accepted_token_count=drafting.accepted_tokens,
        tokens_per_step=drafting.tokens_per_step,
    )


def _encode_loss(loss: Loss) -> cluster_pb.Loss:
    return cluster_pb.Loss(
        loss_time=encode_time(loss.time),
        member=loss.member,
        rank=loss.rank,
        epoch=loss.epoch,
        node=loss.node,
        reason=loss.reason,
        slot_state=cluster_pb.SlotState.Name(_SLOT_STATES.index(loss.slot)),
        retry_time=None if loss.retry_time is None else encode_time(loss.retry_time),
        slot_reason=loss.slot_reason,
    )


def decode_cluster(message: cluster_pb.Cluster) -> Cluster:
    model = cluster_pb.ModelInfo.DESCRIPTOR.fields_by_name
    worker = cluster_pb.Worker.DESCRIPTOR.fields_by_name
    return Cluster(
        model=ModelInfo(**{_MODEL_NAMES.get(field, field): getattr(message.model, field) for field in model}),
        workers=tuple(
            Worker(**{_WORKER_NAMES.get(field, field): getattr(one, field) for field in worker})
            for one in message.workers
        ),
        world_size=message.world_size,
        epoch=message.epoch,
        launcher=message.launcher,
        merge=message.merge,
        transport=message.transport,
        merge_timings=tuple(MergeTiming(t.row_count, t.merge, dict(t.latency_us)) for t in message.merge_timings),
        waiting=message.waiting_count,
        running=message.running_count,
        block_size=message.block_token_count,
        is_exact=message.exact,
        exactness_note=message.exactness_note,
        window_keys=message.window_keys,
        window_tokens=message.window_token_count,
        max_window_tokens=message.max_window_token_count,
        intra_node_transport=message.intra_node_transport,
        inter_node_transport=message.inter_node_transport,
        tier_merges=tuple(TierMerge(t.row_count, t.intra_node, t.inter_node) for t in message.tier_merges),
        recovery=_decode_recovery(message.recovery) if message.HasField("recovery") else None,
        losses=tuple(map(_decode_loss, message.losses)),
        storage=_decode_storage(message.storage) if message.HasField("storage") else None,
        drafting=_decode_drafting(message.drafting) if message.HasField("drafting") else None,
    )


def _decode_drafting(message: cluster_pb.Drafting) -> Drafting:
    return Drafting(
        drafted_tokens=message.drafted_token_count,
        accepted_tokens=message.accepted_token_count,
        tokens_per_step=message.tokens_per_step,
    )


def _decode_storage(message: cluster_pb.Storage) -> Storage:
    return Storage(snapshots=message.snapshots, url=message.url, error=message.error)


def _decode_recovery(message: cluster_pb.Recovery) -> Recovery:
    return Recovery(
        epoch=message.epoch,
        lost_tokens=message.lost_token_count,
        recovered_tokens=message.recovered_token_count,
        seconds=decode_seconds(message.elapsed_duration),
        is_done=message.done,
        dropped_contexts=tuple(name.removeprefix("contexts/") for name in message.dropped_contexts),
    )


def _decode_loss(message: cluster_pb.Loss) -> Loss:
    return Loss(
        time=decode_seconds(message.loss_time),
        member=message.member,
        rank=message.rank if message.HasField("rank") else None,
        epoch=message.epoch,
        node=message.node,
        reason=message.reason,
        slot=enum_value(_SLOT_STATES, message.slot_state),
        retry_time=decode_seconds(message.retry_time) if message.HasField("retry_time") else None,
        slot_reason=message.slot_reason,
    )


def encode_watch(min_interval: float) -> cluster_pb.WatchClusterRequest:
    """Raises InvalidArgument when the interval, in seconds, is out of range."""
    return cluster_pb.WatchClusterRequest(min_interval_duration=encode_measured(_checked(min_interval)))


def decode_watch(message: cluster_pb.WatchClusterRequest) -> float:
    """Minimum seconds between two updates. Raises InvalidArgument."""
    if not message.HasField("min_interval_duration"):
        return DEFAULT_INTERVAL
    return _checked(decode_seconds(message.min_interval_duration))


def _checked(seconds: float) -> float:
    if not MIN_INTERVAL <= seconds <= MAX_INTERVAL:
        limits = f"{human_seconds(MIN_INTERVAL)} and {human_seconds(MAX_INTERVAL)}"
        raise InvalidArgument("min_interval_duration", f"{human_number(seconds)} s is not between {limits}")
    return seconds


def encode_verify(verify: Verify) -> cluster_pb.VerifyClusterRequest:
    """Raises InvalidArgument for values that the message cannot represent."""
    if not 0 <= verify.seed <= MAX_SEED:
        raise InvalidArgument("seed", f"{verify.seed} is not between 0 and 2^64 - 1")
    for field, count in (("prompt_token_count", verify.num_tokens), ("max_token_count", verify.max_tokens)):
        if count is not None and not 1 <= count < 2**31:
            raise InvalidArgument(field, f"{count} is not 1 or more")
    return cluster_pb.VerifyClusterRequest(
        text=None if verify.text is None else to_text(verify.text, "text"),
        seed=verify.seed,
        prompt_token_count=verify.num_tokens,
        max_token_count=verify.max_tokens,
    )


def decode_verify(message: cluster_pb.VerifyClusterRequest) -> Verify:
    return Verify(
        text=message.text if message.HasField("text") else None,
        seed=message.seed,
        num_tokens=message.prompt_token_count if message.HasField("prompt_token_count") else None,
        max_tokens=message.max_token_count if message.HasField("max_token_count") else None,
    )


def encode_verification(found: Verification) -> cluster_pb.VerifyClusterResponse:
    return cluster_pb.VerifyClusterResponse(
        **{field: getattr(found, _VERIFICATION_NAMES.get(field, field)) for field in _verification_fields()},
        reference_duration=encode_measured(found.reference_seconds),
    )


def decode_verification(message: cluster_pb.VerifyClusterResponse) -> Verification:
    fields = {_VERIFICATION_NAMES.get(field, field): getattr(message, field) for field in _verification_fields()}
    return Verification(**fields, reference_seconds=decode_seconds(message.reference_duration))


def _verification_fields() -> list[str]:
    fields = cluster_pb.VerifyClusterResponse.DESCRIPTOR.fields_by_name
    return [field for field in fields if field != "reference_duration"]


def encode_draining(found: Draining) -> cluster_pb.DrainResponse:
    return cluster_pb.DrainResponse(open_call_count=found.open_calls, limit_duration=encode_measured(found.limit))


def decode_draining(message: cluster_pb.DrainResponse) -> Draining:
    return Draining(open_calls=message.open_call_count, limit=decode_seconds(message.limit_duration))
