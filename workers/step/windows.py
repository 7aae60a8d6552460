"""Windowed layers whose keys are replicated on each rank: `longleaf serve --window-keys replicated`.

Their keys have the same slots on every rank, and are held only as long as a later token can attend to them. In decode,
every rank has all rows, so it stores their keys and attends locally. In prefill, the rows of a piece attend to keys in
three places:

    pool        keys before the chunk
    gathered    keys of the chunk before the piece: sent by the ranks that computed them, one layer at a time
    own         keys of the piece itself

The gathered keys that later chunks need are stored in the pool. No results are sent back.
"""

from collections.abc import Iterable

from longleaf.attention.masks import QueryRun, Read, Reads, reads_within
from longleaf.positions import EVERY_RANK, AttentionSpan
from longleaf.rank_protocol.step import Prefill, Row
from longleaf.runs import Extent, Run, union
from workers.host_copies import numbers_on
from workers.kv_cache.block_table import BlockTable, slots_of
from workers.model.model import LayerSpec
from workers.step.gathered_prefill import before_pieces, num_tokens, past_reads
from workers.step.layers import Replicating


class WindowBuilder:
    """Builds the inputs of windowed layers for each chunk."""

    def __init__(self, block_table: BlockTable, layers: dict[int, LayerSpec], *, world_size: int, device: str) -> None:
        self._block_table = block_table
        self._layers = layers
        self._world_size = world_size
        self._device = device

    def chunk(self, work: Prefill) -> dict[int, Replicating]:
        """The inputs by layer. Raises ValueError if the pieces are not adjacent: the keys between them would be
        missing.
        """
        if any(one.end != other.start for one, other in zip(work.pieces[:-1], work.pieces[1:], strict=True)):
            raise ValueError("with replicated windows, pieces must follow one another")
        made = {reach: self._replicating(work, reach) for reach in {spec.reach for spec in self._layers.values()}}
        return {layer: made[spec.reach] for layer, spec in self._layers.items()}

    def row_slots(self, rows: Iterable[Row]) -> list[int]:
        """Slots of the rows' tokens."""
        slots: list[int] = []
        for row in rows:
            slots += slots_of(
                self._block_table.resident_extents(row.path[-1], row.start, row.start + row.num_tokens, EVERY_RANK)
            )
        return slots

    def _replicating(self, work: Prefill, reach: AttentionSpan) -> Replicating:
        end = work.start + len(work.token_ids)
        retained = list(self._block_table.resident_extents(work.path[-1], work.start, end, EVERY_RANK))
        wanted = union([*before_pieces(work.pieces, reach), *((extent.start, extent.end) for extent in retained)])
        shares = [self._share(work.pieces, wanted, rank) for rank in range(self._world_size)]
        longest = max(map(num_tokens, shares))
        gathered_at = {
            position: rank * longest + i
            for rank, share in enumerate(shares)
            for i, position in enumerate(positions_of(share))
        }
        rows = slots_of(shares[self._block_table.rank])
        pool_reads, gathered_reads, own_reads = self._reads(work, shares, longest, reach)
        return Replicating(
            rows_L=numbers_on(self._device, [*rows, *[0] * (longest - len(rows))]),
            pool_reads=pool_reads,
            gathered_reads=gathered_reads,
            own_reads=own_reads,
            index_S=numbers_on(self._device, [gathered_at[position] for position in positions_of(retained)]),
            slots_S=numbers_on(self._device, slots_of(retained)),
        )

    def _reads(
        self, work: Prefill, shares: list[list[Extent]], longest: int, reach: AttentionSpan
    ) -> tuple[Reads, Reads, Reads]:
        """The reads of this rank's pieces from the pool, from the gathered keys, and from the pieces themselves."""
        pool, gathered, own = list[Read](), list[Read](), list[Read]()
        for piece in work.pieces:
            if piece.rank == self._block_table.rank:
                query = QueryRun(piece.start, piece.end, 0)
                first = reach.first(piece.start)
                for extent in self._block_table.extents(work.path, first, work.start, EVERY_RANK, work.hidden):
                    pool += reads_within(query, extent, reach)
                gathered += past_reads(query, shares, longest, reach)
                own += reads_within(query, Extent(piece.start, piece.end, 0), reach)
        return Reads(pool), Reads(gathered), Reads(own)

    @staticmethod
    def _share(pieces: tuple[Run, ...], wanted: list[tuple[int, int]], rank: int) -> list[Extent]:
        """The wanted positions in the pieces of `rank`, as extents that give their rows in the piece."""
        cut = [
            (max(low, piece.start), min(high, piece.end), piece.start)
            for piece in pieces
            if piece.rank == rank
            for low, high in wanted
        ]
        return [Extent(low, high, low - start) for low, high, start in cut if low < high]


def positions_of(extents: list[Extent]) -> list[int]:
    """All positions of the extents, in order."""
    return [position for extent in extents for position in range(extent.start, extent.end)]
