"""Rebalancing: new ranks receive copies of windows first, then runs of other ranks. Pure."""

from dataclasses import dataclass

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.kv_cache.segments import SegmentStore
from longleaf.rank_protocol.step import Move, RunTransfer
from longleaf.runs import Run


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """The moves of the plan in progress."""

    parts: tuple[tuple[SegmentPlacement, Run, Run], ...] = ()
    """For each moved run: its segment, the run before the commit, and the run after it."""
    window_blocks: frozenset[int] = frozenset()


class Rebalancer:
    """Plans moves, one plan at a time. A run stays at its old place until the plan is committed.

    `max_blocks` bounds the blocks that one plan moves.
    """

    def __init__(self, placer: BlockPlacer, segments: SegmentStore, max_blocks: int) -> None:
        self._placer = placer
        self._segments = segments
        self._max_blocks = max_blocks
        self._newcomers = set[int]()
        """New ranks that hold less than their share."""
        self.bare = set[int]()
        """Ranks that lack windows that others hold."""
        self._handed = set[int]()
        """Window blocks that have been sent to the `bare` ranks."""
        self._num_broken = 0
        self.is_stuck = False
        """Whether windows cannot be distributed, because two epochs broke during the transfer."""
        self._under_way: _Moved | None = None

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    @property
    def is_over(self) -> bool:
        """Whether every rank holds its windows and its share."""
        return not self._newcomers and not self.bare and self._under_way is None

    def change_ranks(self, after: dict[int, int], newcomers: tuple[int, ...], *, has_windows: bool) -> None:
        """Registers new ranks. Ranks of the last epoch that had not received their share continue to receive it."""
        self._newcomers = {after[rank] for rank in self._newcomers if rank in after} | set(newcomers)
        self.bare = {after[rank] for rank in self.bare if rank in after} | set(newcomers)
        if not has_windows or self._placer.windows is None:
            self.bare.clear()
        self._handed.clear()
        self.is_stuck = False
        self._num_broken = 0 if newcomers else self._num_broken

    # --- windows ---

    def next_windows(self) -> Move | None:
        """The next windows that rank 0 sends; None when all have been sent."""
        chosen, size = list[Run](), 0
        for placement in self._segments.placements:
            for run in placement.window_runs:
                if size < self._max_blocks and not self._handed.issuperset(run.blocks):
                    chosen.append(run)
                    size += len(run.blocks)
        if not chosen:
            self.bare.clear()
            return None
        self._under_way = _Moved(window_blocks=frozenset(block for run in chosen for block in run.blocks))
        return Move((), tuple(chosen))

    # --- runs ---

    def plan(self) -> Move | None:
        """Moves runs from the rank with the most used blocks to a new rank; None when there is nothing to move now."""
        pools = self._placer.pools
        for rank in sorted(self._newcomers):
            share = sum(pool.num_used for pool in pools) // len(pools)
            source = max(range(len(pools)), key=lambda rank: pools[rank].num_used)
            wanted = min(share - pools[rank].num_used, pools[source].num_used - share)
            if wanted <= 0:
                self._newcomers.discard(rank)
                continue
            room = min(wanted, pools[rank].num_free, self._placer.num_free.sharded, self._max_blocks)
            if room > 0 and (parts := self._parts(source, rank, room)):
                return self._move(parts)
            if room > 0:
                self._newcomers.discard(rank)  # the remaining runs there are about to be freed
        return None

    def _parts(self, source: int, target: int, room: int) -> list[tuple[SegmentPlacement, Run, Run]]:
        """Runs, or their first blocks, to move from `source` to `target`: up to `room` blocks of sealed segments.
        Segments that are only cached are excluded."""
        parts, size = list[tuple[SegmentPlacement, Run, Run]](), self._placer.block_size
        for placement in self._segments.placements:
            if not placement.segment.is_sealed or placement.num_references == placement.num_cache_references:
                continue
            for run in placement.runs:
                if room and run.rank == source:
                    count = min(room, len(run.blocks))
                    end = min(run.end, run.start + count * size)
                    old = Run(source, run.start, end, run.blocks[:count])
                    parts.append((placement, old, self._placer.place_moved(target, run.start, end)))
                    room -= count
        return parts

    def _move(self, parts: list[tuple[SegmentPlacement, Run, Run]]) -> Move:
        for placement, _, target in parts:
            placement.incoming += (target,)
        self._under_way = _Moved(tuple(parts))
        return Move(tuple(RunTransfer(placement.segment.id, old, new) for placement, old, new in parts))

    # --- results ---

    def commit(self) -> None:
        """Completes the moves of the plan, and frees the blocks at the old places."""
        moved, self._under_way = self._under_way, None
        assert moved is not None
        self._handed |= moved.window_blocks
        for placement, old, new in moved.parts:
            if new in placement.incoming:  # false if the segment was freed in the meantime
                placement.incoming = tuple(run for run in placement.incoming if run is not new)
                placement.replace(old, new)
                self._placer.free([old])

    def undo(self, *, has_broken: bool) -> None:
        """Discards the moves of the plan, which did not happen. Moves that have broken two epochs are not retried."""
        moved, self._under_way = self._under_way, None
        for placement, _, new in moved.parts if moved else ():
            if new in placement.incoming:
                placement.incoming = tuple(run for run in placement.incoming if run is not new)
                self._placer.free([new])
        if moved and has_broken:
            self._num_broken += 1
            if self._num_broken > 1:
                self._newcomers.clear()
                self.is_stuck = bool(moved.window_blocks)
