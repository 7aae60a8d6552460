"""Messages about the lifecycle of a member: started, loaded, alive, failed, stopped. Messages about epochs are in
`longleaf.rank_protocol.group_messages`."""

import msgspec

from longleaf.fingerprint import Fingerprint

HEARTBEAT_SECONDS = 1.0
"""Interval of heartbeats."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Coordinator to member: load the model. All machines have the same one."""

    parts: tuple[int, ...] = ()
    """The parts of the weights to hold, if they are sharded; see `longleaf.shares`."""


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Coordinator to member, before an epoch: leave the previous epoch, and use these parts of the weights from now on.
    Parts that are not in memory are read. If there are none, those that are no longer used remain in memory until the
    next layout arrives."""

    parts: tuple[int, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Coordinator to member: exit."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Member to coordinator: the process has started."""

    member: int
    node: str
    host: str
    pid: int
    fingerprint: Fingerprint | None = None
    """Fingerprint of the local model folder; sent by the first member of each machine."""
    missing: str = ""
    """Reason why a required fingerprint is missing."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Member to coordinator: the model is loaded and the pool is allocated. The member can now join epochs."""

    member: int


class WeightsReady(msgspec.Struct, frozen=True, tag="weights_ready"):
    """Member to coordinator: it uses the parts of the last Hold message."""

    member: int
    num_bytes: int
    """Bytes that it read from the checkpoint."""


class Died(msgspec.Struct, frozen=True, tag="failed"):
    """Member to coordinator: an exception ended the process. `refused` marks unusable settings or an unusable model;
    `blamed` is another rank whose loss this member detected."""

    member: int
    reason: str
    refused: bool = False
    blamed: int | None = None


class MemberProgress(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Progress of a member. Among members in the same step, the smallest one is behind."""

    epoch: int = 0
    step: int = 0
    """Number of the last started step."""
    num_exchanges: int = 0
    """Exchanges entered in this step."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Member to coordinator, once per second, from a dedicated thread."""

    member: int
    progress: MemberProgress = MemberProgress()
