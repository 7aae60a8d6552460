"""The cluster. Its structs name the fields in the order and with the meaning of the messages, but shorter."""

from google.protobuf.duration_pb2 import Duration

from longleaf.errors import InvalidArgument
from longleaf.messages import Cluster, ModelInfo, Worker
from longleaf.step import MergeTiming
from longleaf.v1 import cluster_service_pb2 as cluster_pb

DEFAULT_INTERVAL = 1.0
MIN_INTERVAL, MAX_INTERVAL = 0.01, 3600.0

_MODEL_NAMES = {"max_context_token_count": "max_context_tokens"}
_WORKER_NAMES = {"token_count": "tokens", "max_token_count": "max_tokens"}


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
        exact=cluster.is_exact,
    )


def _encode_worker(worker: Worker) -> cluster_pb.Worker:
    fields = cluster_pb.Worker.DESCRIPTOR.fields_by_name
    return cluster_pb.Worker(**{field: getattr(worker, _WORKER_NAMES.get(field, field)) for field in fields})


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
        is_exact=message.exact,
    )


def encode_watch(min_interval: float) -> cluster_pb.WatchClusterRequest:
    """Raises InvalidArgument when the interval, in seconds, is out of range."""
    nanos = round(_checked(min_interval) * 1e9)
    interval = Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
    return cluster_pb.WatchClusterRequest(min_interval_duration=interval)


def decode_watch(message: cluster_pb.WatchClusterRequest) -> float:
    """Seconds between two looks at the least. Raises InvalidArgument."""
    interval = message.min_interval_duration
    if not message.HasField("min_interval_duration"):
        return DEFAULT_INTERVAL
    return _checked(interval.seconds + interval.nanos / 1e9)


def _checked(seconds: float) -> float:
    if not MIN_INTERVAL <= seconds <= MAX_INTERVAL:
        limits = f"{MIN_INTERVAL} s and {MAX_INTERVAL:.0f} s"
        raise InvalidArgument("min_interval_duration", f"{seconds} s is not between {limits}")
    return seconds
