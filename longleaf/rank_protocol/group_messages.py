"""Messages about an epoch, the lifetime of one process group.

An epoch starts with members that have loaded the model. Each is assigned a rank by Join, and receives the placement of
keys by KvLayout; then plans follow. The epoch ends when a member is lost, or when others join: the next Join ends
whatever is left of it.
"""

import msgspec

from longleaf.positions import Rotary, WindowSpec
from longleaf.runs import Run


class OpenStore(msgspec.Struct, frozen=True, tag="open_store"):
    """Coordinator to the member that will be rank 0: open the rendezvous store of this epoch's group."""

    epoch: int


class StoreOpened(msgspec.Struct, frozen=True, tag="store_opened"):
    """Member to coordinator: address of the store."""

    member: int
    epoch: int
    port: int


class MergeTiming(msgspec.Struct, frozen=True):
    """Duration of each merge over these ranks, and the merge chosen by it."""

    rows: int
    """Maximum number of rows for which the choice is valid."""
    merge: str
    """The chosen merge."""
    microseconds: dict[str, float]
    """Median per call, on the slowest rank, by merge."""


class TierMerge(msgspec.Struct, frozen=True):
    """The merge algorithm on each tier of the cluster: inside the nodes, and between them."""

    rows: int
    """Maximum number of rows; 0: any number."""
    intra_node: str = ""
    """How the ranks of a node merge their partials before sending them to other nodes; empty if they do not."""
    inter_node: str = ""
    """How nodes merge, or all ranks at once if there is no merge inside; empty with a single node."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Coordinator to member: take this rank in an epoch, in the process group with its store at `host` and `port`."""

    epoch: int
    rank: int
    host: str
    port: int
    """0 at world size 1, which needs no store."""
    nodes: tuple[str, ...]
    """Machine of each rank."""
    merges: tuple[MergeTiming, ...] = ()
    """Measurements of an earlier epoch, which are reused."""

    @property
    def world_size(self) -> int:
        return len(self.nodes)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Member to coordinator: the group of the epoch is formed."""

    member: int
    device: str
    dtype: str
    num_blocks: int
    """Number of usable blocks of the pool."""
    bytes_per_token: int
    """Bytes of keys and values per token, over all layers."""
    kv_dtype: str = ""
    """Storage type of keys and values."""
    kernels: str = ""
    """Attention implementation, as named in `longleaf.kernels.registry`."""
    transport: str = ""
    """Transport of partials between the ranks; empty at world size 1."""
    merges: tuple[MergeTiming, ...] = ()
    """Measurements from the choice of the merge."""
    intra_node_transport: str = ""
    """Transport of partials between the ranks of one node; empty if no node has several."""
    inter_node_transport: str = ""
    """Transport of partials between nodes; empty if there is only one."""
    tiers: tuple[TierMerge, ...] = ()
    """The merge in use, per tier; empty at world size 1."""
    notes: tuple[str, ...] = ()
    """Warnings that were logged while the model was loaded and the group was joined."""
    details: tuple[str, ...] = ()
    """Informational log messages of the same time, such as the choice of the merge."""
    rotary: Rotary = Rotary()
    full_layers: tuple[int, ...] = ()
    """The full-attention layers."""
    windows: WindowSpec | None = None
    """Set with replicated windows, if the model has sliding-window layers; `num_blocks` and `bytes_per_token` then
    describe only the other layers."""
    epoch: int = 0
    """The epoch that the member has joined."""
    form: str = ""
    """Format of the pool: snapshots can be restored into pools with the same value. Empty if snapshots are unsupported.
    """
    form_of_windows: str = ""
    """The same for the blocks of windows, if they are separate."""
    weight_bytes: int = 0
    """Bytes of the weights that the member holds."""
    weight_parts: int = 0
    """Number of parts of the weights, if they are sharded; 0: the member holds all weights."""
    exactness_note: str = ""
    """Reason why the member could not compare the model with plain attention; empty if it did, or was not asked to."""
    dequantization: str = ""
    """The stored layout and the computed type of quantized weights; empty if they are not quantized."""


class SegmentLayout(msgspec.Struct, frozen=True, array_like=True):
    """Placement of the keys of one segment."""

    segment: int
    start: int
    """Position of its first token, which the runs do not determine, because the first one may be lost."""
    runs: tuple[Run, ...]
    """Existing runs, in order; there may be gaps between them."""
    window_runs: tuple[Run, ...] = ()


class KvLayout(msgspec.Struct, frozen=True, tag="layout"):
    """Coordinator to member, before the first plan of an epoch: the complete placement of stored keys."""

    epoch: int
    segments: tuple[SegmentLayout, ...]


class AbortExchanges(msgspec.Struct, frozen=True, tag="fence"):
    """Coordinator to member, on the heartbeat connection: this epoch has ended, and threads must stop waiting in its
    exchanges."""

    epoch: int


class GroupFailure(msgspec.Struct, frozen=True, tag="broken"):
    """Member to coordinator: an exception ended this epoch on the member. It has left the group, keeps model and keys,
    and waits for the next Join."""

    member: int
    epoch: int
    step: int
    """The failed step; 0: while joining."""
    reason: str
    blamed: int | None = None
    """The rank whose loss it detected."""
