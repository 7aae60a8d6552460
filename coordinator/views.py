"""What the engine holds, as clients see it."""

from collections.abc import Sequence

from coordinator.contexts import Context
from coordinator.events import ContextView, RankShare, WorkerView
from coordinator.positions import Positions
from longleaf.step import Hello, Ready


def view_context(context: Context, readies: Sequence[Ready], positions: Positions, is_exact: bool) -> ContextView:
    shares = enumerate(context.shares(len(readies)))
    return ContextView(
        id=context.id,
        tokens=context.num_tokens,
        kv_bytes=context.num_tokens * readies[0].bytes_per_token,
        created=context.created,
        updated=context.updated,
        shares=tuple(RankShare(rank, tokens) for rank, tokens in shares),
        display_name=context.display_name,
        expires=context.expires,
        is_pinned=context.is_pinned,
        positions=positions.describe(context.rope, context.capacity, context.num_tokens),
        is_exact=is_exact,
    )


def view_worker(hello: Hello, ready: Ready, num_tokens: int, block_size: int) -> WorkerView:
    """A rank that holds `num_tokens` tokens."""
    return WorkerView(
        rank=ready.rank,
        node=hello.node,
        pid=hello.pid,
        device=ready.device,
        tokens=num_tokens,
        max_tokens=ready.num_blocks * block_size,
        kv_bytes=num_tokens * ready.bytes_per_token,
        max_kv_bytes=ready.num_blocks * block_size * ready.bytes_per_token,
    )
