"""What the coordinator and a member say of the member's life: that it is there, has loaded, lives, has failed, must
leave. What an epoch makes of it is in `longleaf.rank_protocol.group_messages`."""

import msgspec

from longleaf.fingerprint import Fingerprint

PULSE_SECONDS = 1.0
"""How often members report that they live."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Coordinator to member: all machines have the same model. Load it."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Coordinator to member: leave."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Member to coordinator: I am here."""

    member: int
    node: str
    host: str
    pid: int
    fingerprint: Fingerprint | None = None
    """Of the model's folder there; told by the first member of each machine."""
    missing: str = ""
    """Why there is none, where it should have been told."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Member to coordinator: the model is loaded and the pool is laid out. From now on it can join epochs."""

    member: int


class Died(msgspec.Struct, frozen=True, tag="failed"):
    """Member to coordinator: an exception ended it. `refused` marks settings or a model that cannot work, `blamed` is
    another rank that this one saw gone."""

    member: int
    reason: str
    refused: bool = False
    blamed: int | None = None


class MemberProgress(msgspec.Struct, frozen=True, array_like=True, order=True):
    """How far a member has come. Of two that are in the same step, the smaller one is behind."""

    epoch: int = 0
    step: int = 0
    """Number of the step that it began last."""
    num_exchanges: int = 0
    """Exchanges that it has entered in this step."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Member to coordinator, once a second, from a thread of its own, whatever the others do."""

    member: int
    progress: MemberProgress = MemberProgress()
