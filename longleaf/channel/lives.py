"""What the coordinator and a rank say of the rank's life: that it is there, is ready, must leave, has failed."""

import msgspec

from longleaf.geometry import Rotary, Windows

PULSE_SECONDS = 1.0
"""How often ranks report that they live."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Coordinator to rank: where the process group of this epoch meets. `nodes` names each rank's machine."""

    epoch: int
    host: str
    port: int
    nodes: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Coordinator to rank: leave."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Rank to coordinator: I am here. Rank 0 tells where its store listens (port 0 at world size 1)."""

    rank: int
    node: str
    host: str
    pid: int
    store_port: int = 0


class MergeTiming(msgspec.Struct, frozen=True):
    """How long each merge takes over these ranks, and which of them was therefore chosen."""

    rows: int
    """For up to so many rows."""
    merge: str
    """The choice."""
    microseconds: dict[str, float]
    """Median per call, on the slowest rank, by merge."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Rank to coordinator: the model is loaded and the pool is laid out."""

    rank: int
    device: str
    dtype: str
    num_blocks: int
    """Blocks of the pool that runs may use."""
    bytes_per_token: int
    """Bytes of keys and values per token, over all layers."""
    kv_dtype: str = ""
    """Type in which keys and values are kept."""
    kernels: str = ""
    """What computes attention there, as `longleaf.kernels.table` names it."""
    transport: str = ""
    """What carries partials between the ranks; empty at world size 1."""
    merges: tuple[MergeTiming, ...] = ()
    """What was measured when the merge was to be chosen."""
    notes: tuple[str, ...] = ()
    """What the rank logged while it started, for people."""
    rotary: Rotary = Rotary()
    windows: Windows | None = None
    """With replicated windows, if the model has windowed layers; `num_blocks` and `bytes_per_token` are then of the
    other layers alone."""


class Died(msgspec.Struct, frozen=True, tag="failed"):
    """Any rank to coordinator: an exception ended this rank. `refused` marks settings or a model that cannot work,
    `blamed` is another rank that this one saw gone."""

    rank: int
    reason: str
    refused: bool = False
    blamed: int | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Any rank to coordinator, once a second, from a thread of its own."""

    rank: int
