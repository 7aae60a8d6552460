"""Block reservations, and the placement of new tokens on ranks. It tracks block ids only and stores no keys."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.kv_cache.block_allocator import BlockAllocator
from coordinator.kv_cache.rank_mapping import RankMapping
from coordinator.kv_cache.windows import WindowBlockPool
from longleaf.errors import ResourceExhausted
from longleaf.positions import EVERY_RANK, WindowSpec
from longleaf.runs import Run, ceil_div, cut_chunk, serpentine


@dataclass(frozen=True, slots=True)
class BlockCount:
    """Numbers of sharded blocks and of window blocks."""

    sharded: int = 0
    """Total over the pools of all ranks."""
    windows: int = 0
    """Blocks of the window pool, which is the same on every rank."""

    def __add__(self, other: "BlockCount") -> "BlockCount":
        return BlockCount(self.sharded + other.sharded, self.windows + other.windows)

    def __sub__(self, other: "BlockCount") -> "BlockCount":
        return BlockCount(self.sharded - other.sharded, self.windows - other.windows)

    def fits(self, room: "BlockCount") -> bool:
        """Whether `room` has at least as many blocks of both kinds."""
        return self.sharded <= room.sharded and self.windows <= room.windows


def count_blocks(runs: Iterable[Run]) -> int:
    return sum(len(run.blocks) for run in runs)


class Reservation:
    """Blocks reserved for one job, on no rank in particular. `left` of them are not allocated yet."""

    def __init__(self, blocks: BlockCount) -> None:
        self.left = blocks

    def split(self, blocks: BlockCount) -> "Reservation":
        """Splits off a part of the reservation."""
        assert blocks.fits(self.left)
        self.left -= blocks
        return Reservation(blocks)


class BlockPlacer:
    """Decides which rank holds which tokens. Any placement is correct; the placer only aims for balance.

    Free blocks are counted over all ranks: a job with a reservation can always be placed, though perhaps not evenly.
    `windows` is None unless each rank holds a copy of the keys of windowed layers.
    """

    def __init__(self, num_blocks: Sequence[int], block_size: int, windows: WindowSpec | None = None) -> None:
        self.block_size = block_size
        self.windows = windows
        self.pools = tuple(BlockAllocator(n) for n in num_blocks)
        self.window_block_size = block_size if windows is None else windows.block_size(block_size)
        self.window_pool = WindowBlockPool(windows, self.window_block_size)
        self.num_reserved = BlockCount()

    @property
    def num_blocks(self) -> BlockCount:
        return BlockCount(sum(pool.num_blocks for pool in self.pools), self.window_pool.num_blocks)

    @property
    def num_free(self) -> BlockCount:
        """Blocks that are neither in use nor reserved."""
        return BlockCount(sum(pool.num_free for pool in self.pools), self.window_pool.num_free) - self.num_reserved

    def reserve(self, blocks: BlockCount) -> Reservation | None:
        """Reserves blocks, or returns None when too few are free."""
        if not blocks.fits(self.num_free):
            return None
        self.num_reserved += blocks
        return Reservation(blocks)

    def add(self, reservation: Reservation, blocks: BlockCount) -> bool:
        """Adds blocks to a reservation. Returns False when too few are free."""
        if (more := self.reserve(blocks)) is None:
            return False
        reservation.left += more.left
        return True

    def release(self, reservation: Reservation) -> None:
        """Returns the unused part of a reservation."""
        self.num_reserved -= reservation.left
        reservation.left = BlockCount()

    def place_chunk(self, start: int, end: int, turn: int, reservation: Reservation) -> tuple[Run, ...]:
        """Runs that cover positions [start, end), at most one per rank, in the serpentine order of chunk `turn`.

        Raises ResourceExhausted when the reservation has too few blocks left.
        """
        self._spend(reservation, BlockCount(ceil_div(end - start, self.block_size)))
        runs: list[Run] = []
        for rank, count in self._distribute(start, end, turn):
            stop = min(start + count * self.block_size, end)
            runs.append(Run(rank, start, stop, self.pools[rank].allocate(count)))
            start = stop
        return tuple(runs)

    def _distribute(self, start: int, end: int, turn: int) -> list[tuple[int, int]]:
        """(rank, blocks) in order. If there are fewer pieces than ranks, the ranks with the most free blocks get them.
        Blocks that do not fit on a rank go to other ranks."""
        order = serpentine(turn, len(self.pools))
        pieces = cut_chunk(start, end, self.block_size, len(order))
        room = {rank: self.pools[rank].num_free for rank in order}
        chosen = set(sorted(order, key=lambda rank: -room[rank])[: len(pieces)])
        wanted = [ceil_div(b - a, self.block_size) for a, b in pieces]
        counts = dict.fromkeys(order, 0) | dict(zip([r for r in order if r in chosen], wanted, strict=True))
        counts = {rank: min(count, room[rank]) for rank, count in counts.items()}
        missing = sum(wanted) - sum(counts.values())
        for rank in sorted(order, key=lambda rank: counts[rank] - room[rank]):
            extra = min(missing, room[rank] - counts[rank])
            counts[rank] += extra
            missing -= extra
        return [(rank, counts[rank]) for rank in order if counts[rank]]

    def grow(self, last: Run | None, start: int, count: int, reservation: Reservation) -> tuple[Run, ...]:
        """Runs for `count` more tokens from position `start`. The run `last` is filled up to the end of its blocks
        first (the result then begins with its new extent); after that each block goes to the rank with the most free
        blocks.

        Raises ResourceExhausted when the reservation has too few blocks left.
        """
        end, runs = start + count, list[Run]()
        if last is not None and (spare := len(last.blocks) * self.block_size - len(last)):
            start = min(last.end + spare, end)
            runs.append(Run(last.rank, last.start, start, last.blocks))
        self._spend(reservation, BlockCount(ceil_div(end - start, self.block_size)))
        while start < end:
            rank = max(range(len(self.pools)), key=lambda r: self.pools[r].num_free)
            stop = min(start + self.block_size, end)
            runs.append(Run(rank, start, stop, self.pools[rank].allocate(1)))
            start = stop
        return tuple(runs)

    def advance_windows(
        self, runs: tuple[Run, ...], start: int, end: int, reservation: Reservation, *, is_chunk: bool
    ) -> tuple[Run, ...]:
        """The window runs of a segment after tokens [start, end) are added. Blocks that these tokens cannot see are
        freed. For a chunk, only the part that the next token sees is added.

        Raises ResourceExhausted when the reservation has too few blocks left. Freed blocks return to the reservation.
        """
        if self.windows is None:
            return ()
        is_last_only = is_chunk or self.windows.is_state
        stored_from = max(start, self.windows.first(end)) if is_last_only else start
        return self._advance_windows(runs, start, (stored_from, end), reservation)

    def recompute_windows(
        self, runs: tuple[Run, ...], chunk: tuple[int, int], window_start: int, place: int, reservation: Reservation
    ) -> tuple[Run, ...]:
        """The window runs of a segment after one of its chunks is recomputed. Keeps positions visible from `place`, and
        positions from `window_start` on, because later segments see them."""
        if self.windows is None:
            return ()
        start, end = chunk
        stored_from = max(start, min(self.windows.first(end), window_start))
        return self._advance_windows(runs, min(start, place), (stored_from, end), reservation)

    def _advance_windows(
        self, runs: tuple[Run, ...], place: int, fresh: tuple[int, int], reservation: Reservation
    ) -> tuple[Run, ...]:
        retained, freed = self.window_pool.split(runs, place)
        self._spend(reservation, BlockCount(windows=self.window_pool.num_more(retained, *fresh) - len(freed)))
        self.window_pool.free(freed)
        return self.window_pool.grow(retained, *fresh)

    @property
    def num_draft_states(self) -> int | None:
        """Number of drafts for whose recurrent states there are free slots; None for a model without states."""
        return self.num_free.windows if self.windows is not None and self.windows.is_state else None

    def add_draft_states(self, runs: tuple[Run, ...], count: int, reservation: Reservation) -> tuple[Run, ...]:
        """The state runs of a segment with those of `count` drafts behind its last token, at most `num_draft_states`.
        The slots are added to the reservation until `drop_draft_states`."""
        added = self.add(reservation, BlockCount(windows=count))
        assert added
        end = runs[-1].end
        self._spend(reservation, BlockCount(windows=count))
        return self.window_pool.grow(runs, end, end + count)

    def drop_draft_states(
        self, runs: tuple[Run, ...], end: int, count: int, reservation: Reservation
    ) -> tuple[Run, ...]:
        """The state run of a segment after the tokens before `end` were accepted: the last state. The slots that
        `add_draft_states` added for `count` drafts are no longer reserved."""
        retained = self.roll_back(runs, end, reservation)
        last = self._advance_windows(retained, end, (end, end), reservation)
        self.release(reservation.split(BlockCount(windows=count)))
        return last

    def return_unwritten(self, runs: Sequence[Run], reservation: Reservation) -> None:
        """Frees runs that hold no valid keys, and returns their blocks to the reservation."""
        blocks = BlockCount(count_blocks(runs))
        self.free(runs)
        reservation.left += blocks
        self.num_reserved += blocks

    def roll_back(self, runs: tuple[Run, ...], end: int, reservation: Reservation | None) -> tuple[Run, ...]:
        """Window runs up to position `end`. If a reservation is given, the freed blocks return to it."""
        retained = self.window_pool.cut(runs, end)
        if reservation is not None:
            freed = BlockCount(windows=count_blocks(runs) - count_blocks(retained))
            reservation.left += freed
            self.num_reserved += freed
        return retained

    def place_recomputed(
        self, ranges: Iterable[tuple[int, int]], size: int, reservation: Reservation
    ) -> tuple[Run, ...]:
        """Runs for the first `size` tokens of the given ranges, in whole blocks from the start of each range: in order,
        at most one per rank, and of similar length.

        Raises ResourceExhausted when the reservation has too few blocks left.
        """
        room = {rank: pool.num_free for rank, pool in enumerate(self.pools) if pool.num_free}
        left, parts = max(1, size // self.block_size), list[tuple[int, int, int, int]]()
        most = ceil_div(left, len(self.pools))
        for start, end in ranges:
            while start < end and room and left:
                rank = max(room, key=room.__getitem__)
                count = min(ceil_div(end - start, self.block_size), room.pop(rank), most, left)
                stop = min(start + count * self.block_size, end)
                parts.append((rank, start, stop, count))
                start, left = stop, left - count
        self._spend(reservation, BlockCount(sum(count for *_, count in parts)))
        return tuple(Run(rank, start, stop, self.pools[rank].allocate(count)) for rank, start, stop, count in parts)

    def place_restored(
        self, rank: int, ranges: Sequence[tuple[int, int]], max_blocks: int, reservation: Reservation
    ) -> tuple[tuple[Run, ...], list[tuple[int, int]]]:
        """Runs on a rank with free blocks, for as much of the given ranges as it takes: whole blocks from the start of
        each range, at least one block and at most `max_blocks`. The second result has the ranges that are left.

        Raises ResourceExhausted when the reservation has too few blocks left.
        """
        pool, runs, rest = self.pools[rank], list[Run](), list[tuple[int, int]]()
        wanted = sum(ceil_div(end - start, self.block_size) for start, end in ranges)
        self._spend(reservation, BlockCount(count := min(wanted, max_blocks, pool.num_free)))
        blocks = pool.allocate(count)  # neighbours if possible, regardless of the ranges
        for start, end in ranges:
            count = ceil_div(end - start, self.block_size)
            taken, blocks = blocks[:count], blocks[count:]
            stop = min(start + len(taken) * self.block_size, end)
            if taken:
                runs.append(Run(rank, start, stop, taken))
            if stop < end:
                rest.append((stop, end))
        return tuple(runs), rest

    def place_windows(self, ranges: Iterable[tuple[int, int]], reservation: Reservation) -> tuple[Run, ...]:
        """Window runs that cover all of the given ranges. Raises as `place_restored`."""
        parts = [(start, end, ceil_div(end - start, self.window_block_size)) for start, end in ranges]
        self._spend(reservation, BlockCount(windows=sum(count for *_, count in parts)))
        return tuple(Run(EVERY_RANK, start, end, self.window_pool.allocate(count)) for start, end, count in parts)

    def place_moved(self, rank: int, start: int, end: int) -> Run:
        """A run for positions that move to a rank from another one, in unreserved blocks."""
        count = ceil_div(end - start, self.block_size)
        assert count <= self.num_free.sharded
        return Run(rank, start, end, self.pools[rank].allocate(count))

    def change_ranks(self, rank_mapping: RankMapping) -> None:
        """Keeps the pools of remaining ranks under their new rank numbers, and creates empty pools for new ranks. All
        reservations must have been released, because there may be fewer blocks."""
        assert self.num_reserved == BlockCount()
        old = self.pools
        pairs = zip(rank_mapping.before, rank_mapping.num_blocks, strict=True)
        self.pools = tuple(BlockAllocator(count) if rank is None else old[rank] for rank, count in pairs)

    def _spend(self, reservation: Reservation, blocks: BlockCount) -> None:
        if not blocks.fits(reservation.left):
            raise ResourceExhausted("blocks", f"{blocks} are needed, {reservation.left} are reserved")
        reservation.left -= blocks
        self.num_reserved -= blocks

    def free(self, runs: Iterable[Run]) -> None:
        for run in runs:
            pool = self.window_pool if run.rank == EVERY_RANK else self.pools[run.rank]
            pool.free(run.blocks)

    def blocks_needed(self, num_prefill: int, num_rows: int, *, num_tails: int = 1, num_at_once: int = 1) -> BlockCount:
        """Blocks that `num_prefill` tokens take in chunks, plus `num_rows` tokens in rows of up to `num_at_once`
        tokens, in each of `num_tails` other segments. The sharded count is exact; the window count is an upper bound.

        All chunks but the last are whole blocks, regardless of their length.
        """
        sharded = ceil_div(num_prefill, self.block_size) + num_tails * ceil_div(num_rows, self.block_size)
        in_rows = self.window_pool.row_blocks(num_rows, num_at_once)
        return BlockCount(sharded, self.window_pool.chunk_blocks(num_prefill) + num_tails * in_rows)

    def audit(self, runs: Iterable[Run]) -> None:
        """Asserts that every used block belongs to exactly one of `runs` (all existing runs), and that every
        reservation can be met."""
        resident = [(run.rank, block) for run in runs for block in run.blocks]
        assert len(resident) == len(set(resident)), "a block is in two runs"
        for rank, pool in [*enumerate(self.pools), (EVERY_RANK, self.window_pool)]:
            pool.audit()
            assert pool.num_used == sum(1 for holder, _ in resident if holder == rank)
        assert BlockCount().fits(self.num_reserved)
        assert BlockCount().fits(self.num_free)
