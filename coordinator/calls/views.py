"""The engine's views and events as clients see them (`longleaf.messages`)."""

from coordinator import events
from longleaf.channel.lives import Ready
from longleaf.config import EngineConfig, Launcher
from longleaf.messages import Cluster, Context, Finished, ModelInfo, Timings, Usage, Worker


def context_of(view: events.ContextView) -> Context:
    return Context(
        id=view.id,
        tokens=view.tokens,
        kv_bytes=view.kv_bytes,
        created=view.created,
        updated=view.updated,
        shares=view.shares,
        display_name=view.display_name,
        expires=view.expires,
        is_pinned=view.is_pinned,
        positions=view.positions,
        is_exact=view.is_exact,
    )


def cluster_of(
    view: events.ClusterView, model: ModelInfo, config: EngineConfig, launcher: Launcher, ready: Ready
) -> Cluster:
    return Cluster(
        model=model,
        workers=tuple(
            Worker(**{field: getattr(worker, field) for field in events.WorkerView.__struct_fields__})
            for worker in view.workers
        ),
        world_size=len(view.workers),
        epoch=view.epoch,
        launcher=launcher,
        merge=config.merge,
        transport=ready.transport,
        merge_timings=ready.merges,
        waiting=view.waiting,
        running=view.running,
        block_size=config.block_size,
        is_exact=config.is_exact,
        window_keys=config.window_keys,
        window_tokens=view.window_tokens,
        max_window_tokens=view.max_window_tokens,
    )


def finished_of(event: events.Ended, is_exact: bool) -> Finished:
    return Finished(
        event.reason,
        "",
        Usage(event.prompt_tokens, event.cached_tokens, event.completion_tokens),
        timings_of(event.queue_seconds, event.first_token_seconds, event.decode_seconds),
        event.sample,
        is_exact,
    )


def timings_of(queue: float, first_token: float, decode: float) -> Timings:
    """Seconds as the engine counts them: queue and first token from arrival, decode from the first token on."""
    return Timings(queue, first_token, decode, max(0.0, first_token - queue))
