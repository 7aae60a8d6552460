"""The summary that a service prints when it is ready."""

from coordinator.kv_cache.positions import UNLIMITED
from longleaf.positions import UNLIMITED_TOKENS
from longleaf.types import Cluster, ModelInfo


def summarize(cluster: Cluster, max_positions: int, threads_per_rank: int) -> tuple[tuple[str, str], ...]:
    """Pairs of a label and a text, for the model, the ranks, the longest document and the capacity. `max_positions` is
    the limit of the model."""
    return (
        ("model", _model(cluster.model)),
        ("ranks", _ranks(cluster, threads_per_rank)),
        ("document", _longest(cluster, max_positions)),
        ("capacity", _tokens(_capacity(cluster)) + " in all contexts and answers"),
    )


def _model(model: ModelInfo) -> str:
    return f"{model.name} ({model.architecture}, {model.dtypes})"


def _ranks(cluster: Cluster, threads_per_rank: int) -> str:
    devices = sorted({worker.device.partition(":")[0] for worker in cluster.workers})
    threads = ""
    if "cpu" in devices:
        threads = " with 1 thread" if threads_per_rank == 1 else f" with {threads_per_rank:,} threads"
        threads += " each" if cluster.world_size > 1 else ""
    return f"{cluster.world_size:,} on {' and '.join(devices)}{threads}, launcher {cluster.launcher}"


def _longest(cluster: Cluster, max_positions: int) -> str:
    capacity = _capacity(cluster)
    if min(max_positions, capacity) >= UNLIMITED_TOKENS:
        return "of any length"
    if max_positions <= capacity:
        return f"up to {max_positions:,} tokens, with its questions and answers"
    limit = "" if max_positions >= UNLIMITED else f"; the model supports {max_positions:,}"
    return f"up to {capacity:,} tokens, with its questions and answers{limit}"


def _capacity(cluster: Cluster) -> int:
    return sum(worker.max_tokens for worker in cluster.workers)


def _tokens(count: int) -> str:
    return "any number of tokens" if count >= UNLIMITED_TOKENS else f"{count:,} tokens"
