"""Restores keys and values from storage: a step that writes fetched pieces to blocks.

Only free blocks are written. At the end all ranks report whether a required piece is missing; until then no rank
treats the positions as held.
"""

from collections import Counter
from collections.abc import Callable

import torch

from longleaf.comm import Comm
from longleaf.errors import PieceNotFetched
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.step import Restore
from longleaf.runs import Run, ceil_div
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.slots import KvPool
from workers.kv_io.kv_piece import KvPiece

NONE = -1

Find = Callable[[int], KvPiece | None]
"""Returns the piece that was fetched under a ticket."""


def restore(work: Restore, comm: Comm | None, pool: KvPool, block_table: BlockTable, find: Find) -> None:
    """Carries out a restore. A collective: all ranks call it at the same time. `comm` is None at world size 1.

    Raises ValueError for an invalid restore, and PieceNotFetched, on every rank, if a rank lacks a fetched piece. The
    block table is then unchanged.
    """
    check(work, comm.world_size if comm else 1, pool.block_size, pool.window_block_size)
    block_table.check_free(work.segment, work.start, work.runs)
    missing = NONE
    for ticket, runs, of_windows in wanted(work, block_table.rank):
        if not write_piece(find(ticket), runs, pool, of_windows=of_windows):
            missing = ticket
    check_all_ranks(comm, pool.device, missing)
    block_table.restore(work.segment, work.start, work.runs, work.window_runs)


def check(work: Restore, world_size: int, block_size: int, window_block_size: int | None = None) -> None:
    """Raises ValueError unless each run has enough blocks, no block is used twice, and each portion is on one rank."""
    places = Counter((run.rank, block) for run in (*work.runs, *work.window_runs) for block in run.blocks)
    if places and places.most_common(1)[0][1] > 1:
        raise ValueError("a block is twice in a restore")
    for runs, size in ((work.runs, block_size), (work.window_runs, window_block_size or block_size)):
        for run in runs:
            if not len(run) or len(run.blocks) != ceil_div(len(run), size) or run.start < work.start:
                raise ValueError(f"a run cannot be restored as {run}")
    ranks = [{run.rank for run in portion.runs} for portion in work.portions]
    if any(len(found) != 1 or not found <= set(range(world_size)) for found in ranks):
        raise ValueError("a portion is not on one rank")
    if any(run.rank != EVERY_RANK for run in work.window_runs):
        raise ValueError("a window is not on every rank")


def wanted(work: Restore, rank: int) -> list[tuple[int, tuple[Run, ...], bool]]:
    """The ticket, the runs, and whether they are of windows, for each part that this rank restores."""
    own = [(portion.ticket, portion.runs, False) for portion in work.portions if portion.runs[0].rank == rank]
    return [*own, (work.window_ticket, work.window_runs, True)] if work.window_runs else own


def write_piece(piece: KvPiece | None, runs: tuple[Run, ...], pool: KvPool, *, of_windows: bool) -> bool:
    """Writes a part of a piece to the blocks of runs; whether the piece has that part."""
    if piece is None or piece.of_windows != of_windows or (numbers := piece.find(runs)) is None:
        return False
    piece.restore(pool, numbers, [block for run in runs for block in run.blocks])
    return True


def check_all_ranks(comm: Comm | None, device: str, missing: int) -> None:
    """Waits for all ranks. Raises PieceNotFetched if one of them lacks a piece."""
    missing_tickets = torch.tensor([missing], device=device)
    for rank, ticket in enumerate((comm.all_gather(missing_tickets) if comm else missing_tickets).flatten().tolist()):
        if ticket != NONE:
            raise PieceNotFetched(rank, ticket)
