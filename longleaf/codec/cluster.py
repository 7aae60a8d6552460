"""Conversion of the cluster messages."""

from functools import partial

from longleaf.codec.derived import Wire, derive
from longleaf.codec.names import bare_context_id, context_name, to_text
from longleaf.codec.times import decode_seconds, encode_measured
from longleaf.errors import InvalidArgument
from longleaf.formatting import human_number, human_seconds
from longleaf.rank_protocol.group_messages import MergeTiming
from longleaf.types import (
    Cluster,
    Draining,
    Loss,
    ModelInfo,
    Recovery,
    Verification,
    Verify,
)
from longleaf.v1 import cluster_service_pb2 as cluster_pb

DEFAULT_INTERVAL = 1.0
MIN_INTERVAL, MAX_INTERVAL = 0.01, 3600.0

MAX_SEED = 2**64 - 1

derive(ModelInfo, cluster_pb.ModelInfo, rope="rope_type")
derive(MergeTiming, cluster_pb.MergeTiming, microseconds="latency_us")
derive(
    Recovery,
    cluster_pb.Recovery,
    seconds="elapsed_duration",
    dropped_contexts=Wire("dropped_contexts", context_name, bare_context_id),
)
derive(Loss, cluster_pb.Loss, time="loss_time", slot="slot_state")
encode_cluster, decode_cluster = derive(Cluster, cluster_pb.Cluster, block_size="block_token_count")
encode_verification, decode_verification = derive(
    Verification,
    cluster_pb.VerifyClusterResponse,
    max_difference="max_logit_difference",
    worst_index="worst_token_index",
)
encode_draining, decode_draining = derive(Draining, cluster_pb.DrainResponse, limit="limit_duration")
_encode_verify, decode_verify = derive(
    Verify,
    cluster_pb.VerifyClusterRequest,
    text=Wire("text", partial(to_text, field="text")),
    num_tokens="prompt_token_count",
    max_tokens="max_token_count",
    client=None,
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
    return _encode_verify(verify)
