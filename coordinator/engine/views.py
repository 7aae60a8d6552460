"""Views of the engine's state for clients."""

from collections.abc import Container, Sequence

from coordinator.cluster.ports import Formation
from coordinator.kv_cache.contexts import NamedContext
from coordinator.kv_cache.positions import Positions
from coordinator.kv_cache.segment_placement import SegmentPlacements
from coordinator.recovery.epochs import Epoch
from coordinator.scheduling.scheduler import Scheduler
from coordinator.scheduling.speculation_stats import DraftCounts
from coordinator.telemetry.counters import Counts
from longleaf import types
from longleaf.config import EngineConfig
from longleaf.rank_protocol.group_messages import Ready
from longleaf.rank_protocol.member_messages import Hello
from longleaf.types import Loss


def view_context(
    context: NamedContext,
    placements: SegmentPlacements,
    readies: Sequence[Ready],
    positions: Positions,
    exactness_note: str,
    storage_bytes: int,
) -> types.Context:
    ready, num_windowed = readies[0], placements.num_window_tokens(context.path)
    resident = enumerate(placements.shares(context.path, len(readies)))
    shares = tuple(types.RankShare(rank, tokens, _kv_bytes(ready, tokens, num_windowed)) for rank, tokens in resident)
    record = context.record
    return types.Context(
        id=record.id,
        tokens=record.num_tokens,
        kv_bytes=sum(share.kv_bytes for share in shares),
        created=record.created,
        updated=record.updated,
        shares=shares,
        display_name=record.display_name,
        expires=record.expires,
        is_pinned=record.is_pinned,
        positions=positions.describe(context.rope, context.capacity, context.num_tokens),
        is_exact=not exactness_note,
        exactness_note=exactness_note,
        state=_state_of(context, placements),
        storage_bytes=storage_bytes,
        used=record.last_used,
        hits=record.num_hits,
    )


def _state_of(context: NamedContext, placements: SegmentPlacements) -> types.ContextState:
    if placements.holds(context.path):
        return "resident"
    return "evicted" if context.is_evicted else "restoring"


def view_cluster(
    scheduler: Scheduler, config: EngineConfig, epoch: Epoch, losses: Sequence[Loss], exactness_note: str
) -> types.Cluster:
    """The active ranks and the load. The engine does not know the model's name or the launcher: both are empty."""
    readies = epoch.formation.readies
    resident, windowed = scheduler.segments.tokens_by_rank(), scheduler.segments.num_window_tokens
    size, gone = config.block_size, {loss.member for loss in losses}
    windows, has_states = readies[0].windows, has_state_pool(readies[0])
    workers = view_workers(epoch.formation, gone, resident, windowed, size)
    return types.Cluster(
        model=types.ModelInfo(name=""),
        workers=workers,
        world_size=len(workers),
        epoch=epoch.number,
        launcher="",
        merge=config.merge,
        transport=readies[0].transport,
        merge_timings=readies[0].merges,
        intra_node_transport=readies[0].intra_node_transport,
        inter_node_transport=readies[0].inter_node_transport,
        tier_merges=readies[0].tiers,
        waiting=scheduler.num_waiting,
        running=scheduler.num_running,
        block_size=size,
        is_exact=not exactness_note,
        exactness_note=exactness_note,
        window_keys=config.window_keys,
        window_tokens=0 if has_states else windowed,
        max_window_tokens=0 if has_states else max_window_tokens(readies[0], size),
        states=windowed if has_states else 0,
        max_states=max_window_tokens(readies[0], size) if has_states else 0,
        state_bytes=windows.bytes_per_token if windows is not None and has_states else 0,
        losses=tuple(losses),
        drafting=view_drafting(scheduler.drafts),
    )


def view_drafting(drafts: DraftCounts) -> types.Drafting:
    return types.Drafting(
        drafted_tokens=drafts.num_drafted,
        accepted_tokens=drafts.num_accepted,
        tokens_per_step=drafts.tokens_per_step,
    )


def count_scheduled(scheduler: Scheduler, counts: Counts) -> None:
    """Copies the scheduler's counters into `counts`, which also has those of the engine."""
    drafts = scheduler.drafts
    counts.num_preempted, counts.num_recomputed_tokens = scheduler.num_preempted, scheduler.num_recomputed_tokens
    counts.num_drafted, counts.num_accepted = drafts.num_drafted, drafts.num_accepted
    counts.num_sampled, counts.num_sequence_steps = drafts.num_sampled, drafts.num_sequence_steps
    counts.num_contexts = scheduler.contexts.count


def view_workers(
    formation: Formation, gone: Container[int], tokens_by_rank: Sequence[int], num_windowed: int, block_size: int
) -> tuple[types.Worker, ...]:
    """The ranks whose members are not in `gone`; `tokens_by_rank` has the number of tokens on each rank."""
    members = zip(tokens_by_rank, formation.hellos, formation.readies, strict=True)
    return tuple(
        view_worker(rank, hello, ready, tokens, num_windowed, block_size)
        for rank, (tokens, hello, ready) in enumerate(members)
        if hello.member not in gone
    )


def view_worker(
    rank: int, hello: Hello, ready: Ready, num_tokens: int, num_windowed: int, block_size: int
) -> types.Worker:
    """A rank that holds `num_tokens` tokens in its pool and `num_windowed` tokens in its window pool."""
    max_tokens, max_windowed = ready.num_blocks * block_size, max_window_tokens(ready, block_size)
    return types.Worker(
        rank=rank,
        node=hello.node,
        pid=hello.pid,
        device=ready.device,
        kernels=ready.kernels,
        address=hello.host,
        tokens=num_tokens,
        max_tokens=max_tokens,
        kv_bytes=_kv_bytes(ready, num_tokens, num_windowed),
        max_kv_bytes=_kv_bytes(ready, max_tokens, max_windowed),
        weight_bytes=ready.weight_bytes,
        weight_parts=ready.weight_parts,
    )


def has_state_pool(ready: Ready) -> bool:
    """Whether the window pool of a rank holds recurrent states."""
    return ready.windows is not None and ready.windows.is_state


def max_window_tokens(ready: Ready, block_size: int) -> int:
    """Capacity of a rank's window pool in tokens, or in recurrent states."""
    return ready.windows.num_blocks * ready.windows.block_size(block_size) if ready.windows else 0


def _kv_bytes(ready: Ready, num_tokens: int, num_windowed: int) -> int:
    windowed = num_windowed * ready.windows.bytes_per_token if ready.windows else 0
    return num_tokens * ready.bytes_per_token + windowed
