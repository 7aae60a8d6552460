"""What the coordinator and the members say of an epoch: the life of one process group.

An epoch begins with members that have loaded the model. Each gets a rank in it by Join, and is told by Layout which
keys lie where; then come plans. It ends when one of them is lost, or when others shall join: the next Join ends what is
left of it.
"""

import msgspec

from longleaf.positions import Rotary, WindowSpec
from longleaf.runs import Run


class OpenStore(msgspec.Struct, frozen=True, tag="open_store"):
    """Coordinator to the member that will be rank 0: open the store where the group of this epoch meets."""

    epoch: int


class StoreOpened(msgspec.Struct, frozen=True, tag="store_opened"):
    """Member to coordinator: there the store listens."""

    member: int
    epoch: int
    port: int


class MergeTiming(msgspec.Struct, frozen=True):
    """How long each merge takes over these ranks, and which of them was therefore chosen."""

    rows: int
    """For up to so many rows."""
    merge: str
    """The choice."""
    microseconds: dict[str, float]
    """Median per call, on the slowest rank, by merge."""


class TierMerge(msgspec.Struct, frozen=True):
    """What a merge does on each tier of the cluster: inside its nodes, and between them."""

    rows: int
    """For up to so many rows; 0: for any number."""
    inside: str = ""
    """How the ranks of a node join their partials before any leaves it; empty where they do not."""
    between: str = ""
    """How those of different nodes do, or all ranks at once where nothing is joined before; empty where there is one
    node."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Coordinator to member: be this rank of an epoch, in the process group that meets at `host` and `port`."""

    epoch: int
    rank: int
    host: str
    port: int
    """0 at world size 1, where nobody is met."""
    nodes: tuple[str, ...]
    """Each rank's machine."""
    merges: tuple[MergeTiming, ...] = ()
    """What an earlier epoch measured: nothing is measured anew."""

    @property
    def world_size(self) -> int:
        return len(self.nodes)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Member to coordinator: the group of the epoch is formed."""

    member: int
    device: str
    dtype: str
    num_blocks: int
    """Blocks of the pool that runs may use."""
    bytes_per_token: int
    """Bytes of keys and values per token, over all layers."""
    kv_dtype: str = ""
    """Type in which keys and values are kept."""
    kernels: str = ""
    """What computes attention there, as `longleaf.kernels.registry` names it."""
    transport: str = ""
    """What carries partials between the ranks; empty at world size 1."""
    merges: tuple[MergeTiming, ...] = ()
    """What was measured when the merge was to be chosen."""
    inside_transport: str = ""
    """What carries partials among the ranks of one node; empty where no node has several."""
    between_transport: str = ""
    """What carries them between nodes; empty where there is one."""
    tiers: tuple[TierMerge, ...] = ()
    """The merge in use, tier by tier; none at world size 1."""
    notes: tuple[str, ...] = ()
    """What the member logged while it loaded and joined, for people."""
    rotary: Rotary = Rotary()
    full_layers: tuple[int, ...] = ()
    """The attention layers that see all keys before them."""
    windows: WindowSpec | None = None
    """With replicated windows, if the model has windowed layers; `num_blocks` and `bytes_per_token` are then of the
    other layers alone."""
    epoch: int = 0
    """The epoch that the member has joined."""
    form: str = ""
    """What a pool must be like to take in what was saved of this one: the same text. Empty where nothing can be."""
    form_of_windows: str = ""
    """That of the blocks that windows have, where they have their own."""
    exactness_note: str = ""
    """Why the member could not compare the model with plain attention; empty where it has, or was not to."""


class SegmentLayout(msgspec.Struct, frozen=True, array_like=True):
    """Where the keys of one segment lie."""

    segment: int
    start: int
    """Position of its first token: no run tells it, for the first one may be lost."""
    runs: tuple[Run, ...]
    """Those that are held, in order; between them others may be missing."""
    window_runs: tuple[Run, ...] = ()


class KvLayout(msgspec.Struct, frozen=True, tag="layout"):
    """Coordinator to member, before the first plan of an epoch: all that is held. Nothing else is."""

    epoch: int
    segments: tuple[SegmentLayout, ...]


class AbortExchanges(msgspec.Struct, frozen=True, tag="fence"):
    """Coordinator to member, on the connection of its pulse: this epoch has ended. Whoever waits for another rank in
    one of its exchanges must not any more."""

    epoch: int


class GroupFailure(msgspec.Struct, frozen=True, tag="broken"):
    """Member to coordinator: an exception ended this epoch for it. It has dropped the group, keeps model and keys, and
    waits for the next Join."""

    member: int
    epoch: int
    step: int
    """The step in which it was; 0: while it joined."""
    reason: str
    blamed: int | None = None
    """The rank that it saw gone."""
