"""Blocks: which are free on each rank, and which runs new tokens go to. Integers only; nothing is stored here."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from longleaf.errors import ResourceExhausted
from longleaf.runs import Run, cut_chunk, serpentine


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class BlockPool:
    """The free blocks of one rank, as sorted stretches of neighbouring ids.

    Neighbouring blocks are one stretch of memory, which a kernel reads without a copy, so allocations look for one.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        self._free: list[tuple[int, int]] = [(0, num_blocks)] if num_blocks else []

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes `count` blocks: the smallest stretch that holds them all, else the longest ones in turn.

        Raises ResourceExhausted, and takes nothing, when there are fewer.
        """
        if count > self.num_free:
            raise ResourceExhausted("blocks", f"{count} are needed, {self.num_free} are free")
        self.num_used += count
        taken: list[int] = []
        while len(taken) < count:
            taken.extend(self._take(count - len(taken)))
        return tuple(taken)

    def _take(self, wanted: int) -> range:
        """Takes up to `wanted` blocks from one stretch."""
        fitting = [i for i, (_, length) in enumerate(self._free) if length >= wanted]
        by_length = [length for _, length in self._free]
        index = min(fitting, key=by_length.__getitem__) if fitting else by_length.index(max(by_length))
        first, length = self._free[index]
        count = min(wanted, length)
        self._free[index : index + 1] = [(first + count, length - count)] if count < length else []
        return range(first, first + count)

    def free(self, ids: Iterable[int]) -> None:
        """Gives blocks back. Raises ValueError when one is not in use."""
        for first, length in _stretches(sorted(ids)):
            self._insert(first, length)
            self.num_used -= length

    def _insert(self, first: int, length: int) -> None:
        index = bisect_left(self._free, (first, 0))
        before = self._free[index - 1] if index else (0, 0)
        after = self._free[index] if index < len(self._free) else (self.num_blocks, 0)
        if sum(before) > first or first + length > after[0]:
            raise ValueError(f"blocks {first} to {first + length - 1} are not all in use")
        low, high = index, index
        if index and sum(before) == first:
            low, first, length = index - 1, before[0], length + before[1]
        if after[1] and first + length == after[0]:
            high, length = index + 1, length + after[1]
        self._free[low:high] = [(first, length)]

    def check(self) -> None:
        """Free plus used is total; stretches are sorted, apart and inside the pool."""
        assert sum(length for _, length in self._free) + self.num_used == self.num_blocks
        ends = [first + length for first, length in self._free]
        assert all(end < first for end, (first, _) in zip(ends, self._free[1:], strict=False))
        assert all(length > 0 for _, length in self._free)
        assert not ends or ends[-1] <= self.num_blocks


def _stretches(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted ids as (first, length) of neighbours. A repeated id starts a stretch of its own."""
    stretches: list[tuple[int, int]] = []
    for block in ids:
        if stretches and sum(stretches[-1]) == block:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1)
        else:
            stretches.append((block, 1))
    return stretches


class Reservation:
    """Blocks promised to one job, on no rank in particular. `left` of them are not taken yet."""

    def __init__(self, num_blocks: int) -> None:
        self.left = num_blocks

    def split(self, num_blocks: int) -> "Reservation":
        """Hands a part of the promise over."""
        assert num_blocks <= self.left
        self.left -= num_blocks
        return Reservation(num_blocks)


class Placer:
    """Decides which rank holds which tokens. Any placement is correct; balance is all it strives for.

    Room is counted over all ranks: a job that holds a reservation can always be placed, though perhaps not evenly.
    """

    def __init__(self, num_blocks: Sequence[int], block_size: int) -> None:
        self.block_size = block_size
        self.pools = tuple(BlockPool(n) for n in num_blocks)
        self.num_reserved = 0

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_free(self) -> int:
        """Blocks that are neither in use nor promised."""
        return sum(pool.num_free for pool in self.pools) - self.num_reserved

    def reserve(self, num_blocks: int) -> Reservation | None:
        """Promises blocks, or gives None when there are too few."""
        if num_blocks > self.num_free:
            return None
        self.num_reserved += num_blocks
        return Reservation(num_blocks)

    def release(self, reservation: Reservation) -> None:
        """Gives back what is left of a promise."""
        self.num_reserved -= reservation.left
        reservation.left = 0

    def place_chunk(self, start: int, end: int, turn: int, reservation: Reservation) -> tuple[Run, ...]:
        """Runs that cover positions [start, end), at most one per rank, in the serpentine order of chunk `turn`.

        Raises ResourceExhausted when the reservation has too few blocks left.
        """
        self._spend(reservation, ceil_div(end - start, self.block_size))
        runs: list[Run] = []
        for rank, count in self._deal(start, end, turn):
            stop = min(start + count * self.block_size, end)
            runs.append(Run(rank, start, stop, self.pools[rank].allocate(count)))
            start = stop
        return tuple(runs)

    def _deal(self, start: int, end: int, turn: int) -> list[tuple[int, int]]:
        """(rank, blocks) in order. Fewer pieces than ranks go to the emptiest; what one cannot hold goes to others."""
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
        """Runs for `count` more tokens from position `start` on: first `last` as far as its blocks reach (the result
        then begins with its new extent), after that one block at a time on the emptiest rank.

        Raises ResourceExhausted when the reservation has too few blocks left.
        """
        end, runs = start + count, list[Run]()
        if last is not None and (spare := len(last.blocks) * self.block_size - len(last)):
            start = min(last.end + spare, end)
            runs.append(Run(last.rank, last.start, start, last.blocks))
        while start < end:
            self._spend(reservation, 1)
            rank = max(range(len(self.pools)), key=lambda r: self.pools[r].num_free)
            stop = min(start + self.block_size, end)
            runs.append(Run(rank, start, stop, self.pools[rank].allocate(1)))
            start = stop
        return tuple(runs)

    def _spend(self, reservation: Reservation, count: int) -> None:
        if count > reservation.left:
            raise ResourceExhausted("blocks", f"{count} are needed, {reservation.left} are reserved")
        reservation.left -= count
        self.num_reserved -= count

    def free(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.pools[run.rank].free(run.blocks)

    def blocks_needed(self, num_prefill: int, num_rows: int) -> int:
        """Blocks that `num_prefill` tokens in chunks and `num_rows` in rows, in another segment, take, exactly.

        Chunks but the last are whole blocks, however long they are.
        """
        return ceil_div(num_prefill, self.block_size) + ceil_div(num_rows, self.block_size)

    def check(self, runs: Iterable[Run]) -> None:
        """Every used block belongs to exactly one of `runs` (all runs there are), and promises can be kept."""
        held = [(run.rank, block) for run in runs for block in run.blocks]
        assert len(held) == len(set(held)), "a block is in two runs"
        for rank, pool in enumerate(self.pools):
            pool.check()
            assert pool.num_used == sum(1 for holder, _ in held if holder == rank)
        assert self.num_reserved >= 0
        assert self.num_free >= 0
