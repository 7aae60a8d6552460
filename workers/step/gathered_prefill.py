"""Prefill that gathers the keys before each piece of a chunk from all ranks.

A chunk is cut into pieces, one per rank, and the rows of a piece see keys on other ranks. Either the queries of all
pieces are gathered and their partials sent back to the owners, or the keys and values before any piece are gathered,
for one layer at a time, and every rank attends locally without a merge. Both are exact. The bytes that a rank sends to
each other rank, per layer, with R rows of the longest piece and S keys of the largest share:

    queries   R x (heads x dim x size of a number + a packed float32 partial)
    keys      S x key heads x (dim + dim of values) x size of a number; without values where these lie in the keys

The bytes of the queries do not grow with the past, those of the keys do; within a limited reach S is bounded. The
cheaper way is chosen per chunk and layer, on integers that all ranks have.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longleaf.attention.masks import QueryRun, Read, Reads, reads_within
from longleaf.config import PrefillName
from longleaf.merge import PartialCodec
from longleaf.positions import AttentionSpan
from longleaf.rank_protocol.step import Prefill
from longleaf.runs import Extent, Run, ceil_div, union, without
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.slots import KvPool
from workers.kv_cache.workspace_estimate import MAX_GATHERED
from workers.model.model import LayerSpec
from workers.step.layers import ChunkLayer, Gathered


class PastBuilder:
    """Selects for each chunk the layers that gather keys, and builds their inputs."""

    def __init__(
        self,
        block_table: BlockTable,
        pool: KvPool,
        layers: dict[int, LayerSpec],
        *,
        world_size: int,
        way: PrefillName,
        wire: PartialCodec,
    ) -> None:
        self._block_table = block_table
        self._pool = pool
        self._layers = layers
        self._world_size = world_size
        self._way = way
        self._wire = wire

    def build(self, work: Prefill, slots_T: Tensor) -> dict[int, ChunkLayer]:
        """The layers that gather keys; in the others the queries are gathered. `slots_T` are the slots to store the
        keys in.
        """
        if self._world_size == 1 or self._way == "queries":
            return {}
        gathered: dict[int, ChunkLayer] = {}
        for reach in {spec.reach for spec in self._layers.values()}:
            layers = [layer for layer, spec in self._layers.items() if spec.reach == reach]
            before = before_pieces(work.pieces, reach)
            wanted = [part for low, high in before for part in without(low, high, work.hidden)]
            fewest = ceil_div(sum(high - low for low, high in wanted), self._world_size)
            if not self._gathering_layers(layers, work, fewest):
                continue  # even equal shares would be too large: the past need not be searched
            shares = [self._share(work.path, wanted, rank) for rank in range(self._world_size)]
            longest = max(map(num_tokens, shares))
            if layers := self._gathering_layers(layers, work, longest):
                past_L = self._past_slots(shares[self._block_table.rank], longest)
                reads = self._reads(work.pieces, shares, longest, reach)
                gathered |= dict.fromkeys(layers, Gathered(slots_T, past_L, *reads))
        return gathered

    def _gathering_layers(self, layers: Sequence[int], work: Prefill, longest: int) -> list[int]:
        """The layers that gather keys if the largest share has `longest` tokens."""
        if longest * self._world_size > MAX_GATHERED:
            return []
        rows = max(len(piece) for piece in work.pieces)
        return [i for i in layers if self._way == "keys" or self._is_gather_smaller(self._layers[i], rows, longest)]

    def _is_gather_smaller(self, spec: LayerSpec, rows: int, longest: int) -> bool:
        """Whether `longest` keys and values are fewer bytes than `rows` queries and their partials."""
        size = self._pool.dtype.itemsize
        partial = self._wire.row_bytes(spec.num_heads, spec.value_dim)
        query = spec.num_heads * spec.head_dim * size
        return longest * spec.num_stored * size < rows * (query + partial)

    def _share(self, path: Sequence[int], wanted: list[tuple[int, int]], rank: int) -> list[Extent]:
        return [extent for low, high in wanted for extent in self._block_table.extents(path, low, high, rank)]

    def _past_slots(self, share: list[Extent], longest: int) -> Tensor:
        slots = [torch.arange(extent.slot, extent.slot + extent.end - extent.start) for extent in share]
        slots.append(torch.full((longest - num_tokens(share),), self._pool.trash_slot))
        return torch.cat(slots).to(self._pool.device)

    def _reads(
        self, pieces: Sequence[Run], shares: list[list[Extent]], longest: int, reach: AttentionSpan
    ) -> tuple[Reads, Reads]:
        """The reads of the own piece from the gathered keys, and from the piece itself."""
        before, own = list[Read](), list[Read]()
        for piece in pieces:
            if piece.rank == self._block_table.rank:
                query = QueryRun(piece.start, piece.end, 0)
                before += past_reads(query, shares, longest, reach)
                own += reads_within(query, Extent(piece.start, piece.end, 0), reach)
        return Reads(before), Reads(own)


def before_pieces(pieces: Sequence[Run], reach: AttentionSpan) -> list[tuple[int, int]]:
    """Positions [start, end) before any piece and within its reach, in order, with adjacent ranges joined."""
    return union((reach.first(piece.start), piece.start) for piece in pieces)


def past_reads(query: QueryRun, shares: list[list[Extent]], longest: int, reach: AttentionSpan) -> list[Read]:
    """The reads of a piece from gathered shares: the positions of each rank's share before the piece.

    With full reach this is the beginning of the share, in one read: order and gaps do not matter to rows that see all
    keys.
    """
    found: list[Read] = []
    for rank, share in enumerate(shares):
        before = [extent for extent in share if extent.start < query.start]
        slot = rank * longest
        if reach.is_full and before:
            found.append(Read(query.row, query.row + query.end - query.start, slot, slot + num_tokens(before)))
            continue
        for extent in before:
            found.extend(reads_within(query, extent._replace(slot=slot), reach))
            slot += extent.end - extent.start
    return found


def num_tokens(extents: Sequence[Extent]) -> int:
    return sum(extent.end - extent.start for extent in extents)
