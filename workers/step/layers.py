"""What each attention layer does in a step: one of these, decided before the model runs."""

from dataclasses import dataclass

from torch import Tensor

from longleaf.attention.masks import Reads


@dataclass(frozen=True, slots=True)
class Sharded:
    """Each key is kept by one rank: every rank has all queries and attends to what it keeps, and partials are
    merged."""

    slots_T: Tensor
    """Slot of each token's keys; the trash slot for tokens that another rank owns."""
    reads: Reads
    """What the rows read from this rank's pool."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A chunk, and each key is kept by one rank: what lies before the pieces is gathered, and nothing is merged.

    L is the largest share of a rank. In the gathered tensor the share of rank r, in order of positions, begins at slot
    r * L.
    """

    slots_T: Tensor
    """As of a sharded layer."""
    past_L: Tensor
    """Slots of this rank's share, padded with the trash slot. Empty on all ranks when there is nothing to gather."""
    past_reads: Reads
    """What the rows of the own piece read from the gathered keys: everything before the piece."""
    own_reads: Reads
    """What they read from the keys of the piece itself, which begin at slot 0."""


@dataclass(frozen=True, slots=True)
class Replicating:
    """A chunk, and each key is kept by every rank for as long as it is seen: those of the chunk are gathered.

    L is the largest share of a rank. In the gathered tensor the share of rank r, in order of positions, begins at slot
    r * L.
    """

    rows_L: Tensor
    """Rows of the own piece whose keys are this rank's share, padded with the first."""
    pool_reads: Reads
    gathered_reads: Reads
    own_reads: Reads
    """What the rows of the own piece read from the pool, from the gathered keys, and from the keys of the piece."""
    kept_S: Tensor
    """Slots of the gathered keys that go into the pool,"""
    slots_S: Tensor
    """and where to."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Rows, and each key is kept by every rank: nothing is exchanged."""

    slots_T: Tensor
    """Slot of each token's keys."""
    reads: Reads
    """What the rows read from the pool."""


ChunkLayer = Sharded | Gathered | Replicating
RowLayer = Sharded | Replicated
