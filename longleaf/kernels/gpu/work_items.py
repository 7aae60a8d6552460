"""Converts the reads of a step to work items: one launch of an attention kernel for all key heads of a layer.

Rows that read the same stretches of keys form a chain. The keys of a chain, one stretch after the other, are divided
into pieces of about equal length, so that the device is fully used; each row gets one partial per piece. A piece has
one item per tile of its rows: these items read the same keys at about the same time, so each key is loaded from memory
once. Stretches are divided at multiples of BLOCK slots, where tiles of keys start, so no two programs report one block
of a read.

    row        query of one head of a key head's group: token * group + member, the same for each key head
    item       a tile of rows over a piece
    part row   index of the partial of a row over a piece: `shift` of the piece + row

The table is sent to the device as one array of integers:

    [0:4]      number of items; where stretches, tokens and shifts begin
    items      ITEM numbers each: row start, row end, stretch start, stretch end, shift
    stretches  STRETCH numbers each: slot start, slot end, ahead, window. The row of token t sees the key in slot s iff
               0 <= ahead + t - s < window
    tokens     TOKEN numbers each: start and end of its shifts
    shifts     of the pieces that have partials of a token's rows, in fold order
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from longleaf.attention.block_attribution import BLOCK
from longleaf.attention.masks import Read
from longleaf.runs import ceil_div

HEADER, ITEM, STRETCH, TOKEN = 4, 5, 4, 2
MIN_PIECE = 512
"""Minimum keys per piece, unless its rows see fewer: below it, starting a program takes as long as its work."""
MIN_TILE_ROWS = 16
"""Rows of the smallest matrix product."""
MIN_TABLE = 256
"""Minimum table size. Tables and partials are sized in powers of two, to limit the number of distinct sizes."""


class SlotRange(NamedTuple):
    """Slots [start, end), of which the row of token t sees s iff 0 <= ahead + t - s < window."""

    start: int
    end: int
    ahead: int
    window: int
    read: int
    """The number of their read."""

    @property
    def first(self) -> int:
        """The slot at which its first tile starts."""
        return self.start // BLOCK * BLOCK

    @property
    def num_keys(self) -> int:
        """Number of keys in its tiles, including those before the first one."""
        return self.end - self.first


class ReadChain(NamedTuple):
    """Tokens [start, end) and the slots that their rows see, in the order of the reads."""

    start: int
    end: int
    stretches: Sequence[SlotRange]

    @property
    def num_keys(self) -> int:
        return sum(stretch.num_keys for stretch in self.stretches)


class WorkPiece(NamedTuple):
    """The tokens of a chain over a part of their slots, and the position of their rows' partials."""

    chain: ReadChain
    shift: int


class Work(NamedTuple):
    """The work items of a step."""

    numbers: list[int]
    """The table, padded with zeros to a power of two."""
    num_part_rows: int
    """Required capacity in part rows per key head."""
    tile_rows: int
    """Maximum rows of an item, a power of two: the number of rows that share reads of keys, up to a limit."""
    reads: list[int]
    """The read number of each stretch."""


class Shape(NamedTuple):
    """Inputs of a layer's work besides its reads; equal shapes may share a table."""

    num_tokens: int
    group: int
    num_kv_heads: int
    max_tile_rows: int
    """Maximum rows of an item, a power of two."""
    tile_keys: int
    """Keys read at once: pieces are multiples of it."""
    min_piece: int | None = None
    """Minimum keys per piece; None: MIN_PIECE."""


def work_of(reads: Iterable[Read], shape: Shape, num_programs: int, tile_rows: int | None = None) -> Work:
    """The work items of some reads, enough for `num_programs` if there are enough keys. Without `tile_rows` an item has
    as many rows as share reads of keys."""
    chains = sorted(chains_of(reads), key=lambda chain: -chain.num_keys)
    if tile_rows is None:
        most_rows = max((chain.end - chain.start for chain in chains), default=0) * shape.group
        tile_rows = tile_of(most_rows, shape)
    num_items = [ceil_div((chain.end - chain.start) * shape.group, tile_rows) * shape.num_kv_heads for chain in chains]
    size = piece_size([chain.num_keys for chain in chains], num_items, shape.tile_keys, num_programs, shape.min_piece)
    items: list[tuple[int, tuple[int, ...]]] = []
    stretches: list[SlotRange] = []
    pieces: list[WorkPiece] = []
    num_part_rows = 0
    for chain in chains:
        first, last = chain.start * shape.group, chain.end * shape.group
        for part in cut(chain, size, shape.tile_keys):
            begin, shift = len(stretches), num_part_rows - first
            stretches += part
            pieces.append(WorkPiece(chain, shift))
            num_part_rows += last - first
            num_keys = sum(stretch.num_keys for stretch in part)
            for row in range(first, last, tile_rows):
                end = min(row + tile_rows, last)
                items.append((num_keys, (row, end, begin, len(stretches), shift)))
    items.sort(key=lambda item: -item[0])  # long ones first, which balances the end of the launch
    rows = [number for _, item in items for number in item]
    table = _table(rows, stretches, pieces, shape.num_tokens)
    of_reads = [stretch.read for stretch in stretches]
    return Work(table, power_of_two(num_part_rows, MIN_TILE_ROWS), tile_rows, of_reads)


def tile_of(num_rows: int, shape: Shape) -> int:
    """Rows of an item if this number of rows of a key head's group share reads of keys."""
    return min(shape.max_tile_rows, power_of_two(num_rows, MIN_TILE_ROWS))


def chains_of(reads: Iterable[Read]) -> list[ReadChain]:
    """The slots that rows see, without hidden ones. Reads of the same rows form one chain."""
    found: dict[tuple[int, int], list[SlotRange]] = {}
    for number, read in enumerate(reads):
        offset, window = read.mask
        ahead = offset - read.row_start + read.slot_start
        low = max(read.slot_start, ahead + read.row_start - window + 1)
        high = min(read.slot_end, ahead + read.row_end)
        if read.row_start < read.row_end and low < high:
            found.setdefault(read[:2], []).append(SlotRange(low, high, ahead, window, number))
    return [ReadChain(*rows, stretches) for rows, stretches in found.items()]


def piece_size(
    num_keys: Sequence[int],
    num_items: Sequence[int],
    tile_keys: int,
    num_programs: int,
    min_piece: int | None = None,
) -> int:
    """Keys of a piece, a multiple of the tile, from the keys of each chain and its number of uncut items.

    The smallest size that makes no more items than there are programs. With many chains there are more items than
    programs anyway; then their number may double.
    """
    limit = max(num_programs, 2 * sum(num_items))
    least = ceil_div(min_piece or MIN_PIECE, tile_keys)
    most = ceil_div(max(num_keys, default=0), tile_keys)

    def can_be(length: int) -> bool:
        pairs = zip(num_keys, num_items, strict=True)
        return sum(ceil_div(keys, length * tile_keys) * items for keys, items in pairs) <= limit

    return (least + bisect_left(range(least, most), True, key=can_be)) * tile_keys


def cut(chain: ReadChain, size: int, tile_keys: int) -> Iterator[list[SlotRange]]:
    """The stretches of a chain in pieces of `size` keys, or up to the next multiple of BLOCK slots; the last one may be
    shorter."""
    num_pieces = ceil_div(chain.num_keys, size)
    size = ceil_div(ceil_div(chain.num_keys, num_pieces), tile_keys) * tile_keys
    piece: list[SlotRange] = []
    room = size
    for stretch in chain.stretches:
        low, first = stretch.start, stretch.first
        while low < stretch.end:
            high = min(stretch.end, ceil_div(first + room, BLOCK) * BLOCK)
            piece.append(stretch._replace(start=low, end=high))
            room -= high - first
            low = first = high
            if room <= 0:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def power_of_two(number: int, least: int) -> int:
    """The smallest power of two that is at least both."""
    return max(least, 1 << max(0, number - 1).bit_length())


def _table(items: list[int], stretches: Sequence[SlotRange], pieces: Sequence[WorkPiece], num_tokens: int) -> list[int]:
    tokens, shifts = _folds(pieces, num_tokens)
    flat = [number for stretch in stretches for number in stretch[:STRETCH]]
    stretches_at = HEADER + len(items)
    tokens_at = stretches_at + len(flat)
    shifts_at = tokens_at + len(tokens)
    numbers = [len(items) // ITEM, stretches_at, tokens_at, shifts_at, *items, *flat, *tokens, *shifts]
    return numbers + [0] * (power_of_two(len(numbers), MIN_TABLE) - len(numbers))


def _folds(pieces: Sequence[WorkPiece], num_tokens: int) -> tuple[list[int], list[int]]:
    """Start and end of each token's shifts, and the shifts; tokens between two bounds of chains have the same."""
    bounds = sorted({0, num_tokens, *(bound for piece in pieces for bound in piece.chain[:2])})
    starting: dict[int, list[WorkPiece]] = {}
    for piece in pieces:
        starting.setdefault(piece.chain.start, []).append(piece)
    tokens: list[int] = []
    shifts: list[int] = []
    seen: list[WorkPiece] = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        seen = [piece for piece in seen if piece.chain.end > low] + starting.get(low, [])
        tokens += [len(shifts), len(shifts) + len(seen)] * (high - low)
        shifts += [piece.shift for piece in seen]
    return tokens, shifts
