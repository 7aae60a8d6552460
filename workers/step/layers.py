"""The work of an attention layer in a step. One of these classes is selected before the model runs."""

from dataclasses import dataclass

from torch import Tensor

from longleaf.attention.masks import Reads


@dataclass(frozen=True, slots=True)
class Sharded:
    """Each key is on one rank. Every rank has all queries and attends to the keys that it holds. Partials are
    merged."""

    slots_T: Tensor
    """Slot of each token's keys; the trash slot for tokens that another rank owns."""
    reads: Reads
    """Reads of the rows from this rank's pool."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A chunk in a layer whose keys are each on one rank. The keys before the pieces are gathered; nothing is merged.

    L is the largest share of a rank. In the gathered tensor the share of rank r, in order of positions, begins at slot
    r * L.
    """

    slots_T: Tensor
    """As in `Sharded`."""
    past_L: Tensor
    """Slots of this rank's share, padded with the trash slot. Empty on all ranks when there is nothing to gather."""
    past_reads: Reads
    """Reads of the own piece's rows from the gathered keys: everything before the piece."""
    own_reads: Reads
    """Reads of the own piece's rows from the keys of the piece itself, which begin at slot 0."""


@dataclass(frozen=True, slots=True)
class Replicating:
    """A chunk in a layer whose visible keys are on every rank. The keys of the chunk are gathered.

    L is the largest share of a rank. In the gathered tensor the share of rank r, in order of positions, begins at slot
    r * L.
    """

    rows_L: Tensor
    """Rows of the own piece whose keys are this rank's share, padded with row 0."""
    pool_reads: Reads
    gathered_reads: Reads
    own_reads: Reads
    """Reads of the own piece's rows from the pool, from the gathered keys, and from the keys of the piece."""
    index_S: Tensor
    """Slots, in the gathered tensor, of the keys that are stored in the pool."""
    slots_S: Tensor
    """The pool slots of these keys."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Rows in a layer whose visible keys are on every rank. Nothing is exchanged."""

    slots_T: Tensor
    """Slot of each token's keys."""
    reads: Reads
    """Reads of the rows from the pool."""


ChunkLayer = Sharded | Gathered | Replicating
RowLayer = Sharded | Replicated
