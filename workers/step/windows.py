"""Windowed layers whose keys each rank holds itself: `longleaf serve --window-keys replicated`.

Their keys lie in the same slots on every rank, and only as long as a later token may see them. In decode every rank has
all rows, so it stores their keys and attends alone. In prefill the rows of a piece see keys in three places:

    pool        before the chunk
    gathered    of the chunk, before the piece: sent by the ranks that computed them, for one layer at a time
    own         of the piece itself

and what the token after the chunk will see goes from the gathered keys into the pool. Nothing goes back to anyone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longleaf.attention.masks import QueryRun, Read, Reads, reads_within
from longleaf.channel.step import Prefill
from longleaf.geometry import EVERY_RANK, Reach
from longleaf.runs import Extent, Run, union
from workers.keys.cache import Segments, slots_of
from workers.model.model import LayerSpec
from workers.step.past import before_pieces, num_tokens, past_reads


@dataclass(frozen=True, slots=True)
class Fresh:
    """What a rank does with the keys of a chunk in a windowed layer; L is the largest share of a rank.

    In the gathered tensor the share of rank r, in order of positions, begins at slot r * L.
    """

    rows_L: Tensor
    """Rows of the own piece whose keys are this rank's share, padded with the first."""
    pool_reads: Reads
    gathered_reads: Reads
    own_reads: Reads
    """What the rows of the own piece read from each of the three places."""
    kept_S: Tensor
    """Slots of the gathered keys that go into the pool,"""
    slots_S: Tensor
    """and where to."""


class WindowBuilder:
    """Builds what windowed layers need of each chunk."""

    def __init__(
        self, rank: int, world_size: int, segments: Segments, layers: dict[int, LayerSpec], device: str
    ) -> None:
        self.layers = layers
        self._rank = rank
        self._world_size = world_size
        self._segments = segments
        self._device = device

    def build(self, work: Prefill) -> dict[int, Fresh]:
        """By layer."""
        made = {reach: self._fresh(work, reach) for reach in {spec.reach for spec in self.layers.values()}}
        return {layer: made[spec.reach] for layer, spec in self.layers.items()}

    def _fresh(self, work: Prefill, reach: Reach) -> Fresh:
        end = work.start + len(work.token_ids)
        kept = list(self._segments.held(work.path[-1], work.start, end, EVERY_RANK))
        wanted = union([*before_pieces(work.pieces, reach), *((extent.start, extent.end) for extent in kept)])
        shares = [self._share(work.pieces, wanted, rank) for rank in range(self._world_size)]
        longest = max(map(num_tokens, shares))
        gathered_at = {
            position: rank * longest + i
            for rank, share in enumerate(shares)
            for i, position in enumerate(positions_of(share))
        }
        rows = slots_of(shares[self._rank])
        return Fresh(
            self._tensor([*rows, *[0] * (longest - len(rows))]),
            *self._reads(work, shares, longest, reach),
            kept_S=self._tensor([gathered_at[position] for position in positions_of(kept)]),
            slots_S=self._tensor(slots_of(kept)),
        )

    def _reads(
        self, work: Prefill, shares: list[list[Extent]], longest: int, reach: Reach
    ) -> tuple[Reads, Reads, Reads]:
        pool, gathered, own = list[Read](), list[Read](), list[Read]()
        for piece in work.pieces:
            if piece.rank == self._rank:
                query = QueryRun(piece.start, piece.end, 0)
                for extent in self._segments.extents(work.path, reach.first(piece.start), work.start, EVERY_RANK):
                    pool += reads_within(query, extent, reach)
                gathered += past_reads(query, shares, longest, reach)
                own += reads_within(query, Extent(piece.start, piece.end, 0), reach)
        return Reads(pool), Reads(gathered), Reads(own)

    @staticmethod
    def _share(pieces: tuple[Run, ...], wanted: list[tuple[int, int]], rank: int) -> list[Extent]:
        """The wanted positions of a rank's piece, with their rows there."""
        cut = [
            (max(low, piece.start), min(high, piece.end), piece.start)
            for piece in pieces
            if piece.rank == rank
            for low, high in wanted
        ]
        return [Extent(low, high, low - start) for low, high, start in cut if low < high]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def positions_of(extents: list[Extent]) -> list[int]:
    """Each position of extents."""
    return [position for extent in extents for position in range(extent.start, extent.end)]
