"""What a rank is given when its process is started, before it can say a word."""

from typing import Any

import msgspec

from longleaf.config import EngineConfig


class ConnectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a member needs to speak on the control channel. Keys are ZMQ's, as text of 40 bytes."""

    address: str
    """ZMQ endpoint of the coordinator, `tcp://host:port`."""
    server_key: bytes
    """Public key of the coordinator: nobody else can take its place."""
    public_key: bytes
    """The member's key. The coordinator knows by it who speaks; the other members do not know it."""
    secret_key: bytes

    def __repr__(self) -> str:
        """Without the keys: logs and tracebacks are read by others."""
        return f"{type(self).__name__}(address={self.address!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("address", self.address)]

    @property
    def commands_id(self) -> bytes:
        """Name of the connection on which the member receives plans and answers them."""
        return b"commands-" + self.public_key

    @property
    def pulse_id(self) -> bytes:
        """Name of the connection on which it reports that it lives."""
        return b"pulse-" + self.public_key


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher tells a member at birth. Which rank it has, each epoch tells anew."""

    member: int
    """Its number: that of no other member of this service, ever."""
    config: EngineConfig
    """Its world size is that of the first epoch."""
    invitation: ConnectInfo
    host: str
    """Address under which other ranks reach this one."""
    node: str
    """Name of this rank's machine."""
    num_ranks_here: int
    """Ranks of this machine, which share its memory."""
    is_first_here: bool = False
    """Whether this member tells for its machine which model it has."""
    gpu: int | None
    """Which of the GPUs that it sees is this rank's own, from 0; None: none of them. The numbers go on where more ranks
    see them than there are."""
    num_ranks_seeing: int = 1
    """Ranks that see the same GPUs."""
