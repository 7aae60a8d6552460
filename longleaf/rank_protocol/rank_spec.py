"""Startup parameters of a rank's process."""

from typing import Any

import msgspec

from longleaf.config import EngineConfig


class ConnectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the control channel. Keys are ZMQ's, as text of 40 bytes."""

    address: str
    """ZMQ endpoint of the coordinator, `tcp://host:port`."""
    server_key: bytes
    """Public key of the coordinator, which authenticates it."""
    public_key: bytes
    """The member's public key, by which the coordinator authenticates it. Other members do not know it."""
    secret_key: bytes

    def __repr__(self) -> str:
        """Without the keys, because logs and tracebacks may be shared."""
        return f"{type(self).__name__}(address={self.address!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("address", self.address)]

    @property
    def commands_id(self) -> bytes:
        """Identity of the connection for plans and their results."""
        return b"commands-" + self.public_key

    @property
    def heartbeat_id(self) -> bytes:
        """Identity of the connection for heartbeats."""
        return b"heartbeat-" + self.public_key


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters from the launcher to a new member. Its rank is assigned per epoch."""

    member: int
    """Its number, unique over the lifetime of the service."""
    config: EngineConfig
    """Its world size is that of the first epoch."""
    invitation: ConnectInfo
    host: str
    """Address at which other ranks reach this one."""
    node: str
    """Name of this rank's machine."""
    num_ranks_here: int
    """Ranks on this machine, which share its memory."""
    is_first_here: bool = False
    """Whether this member reports the machine's model fingerprint."""
    gpu: int | None
    """Index of this rank's GPU among the visible ones, from 0; None: no GPU. Indices continue beyond the number of
    visible GPUs if more ranks see them."""
    num_ranks_seeing: int = 1
    """Number of ranks that see the same GPUs."""
