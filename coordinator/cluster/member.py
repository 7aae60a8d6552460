"""The state of one worker process: its startup, its heartbeats, and its progress in the current step."""

from dataclasses import dataclass, field

from coordinator.cluster.weight_deal import NO_PARTS, Parts
from longleaf.rank_protocol.member_messages import Heartbeat, Hello, Loaded, MemberProgress, WeightsReady

IS_SILENT = 2
"""Missed heartbeats after which a member counts as silent."""


@dataclass
class Member:
    """One worker process."""

    number: int
    slot: int = 0
    """Its slot: the index of its rank in the first epoch, or that of the member that it replaces."""
    parts: Parts = NO_PARTS
    """The parts of the weights that the member has in memory or is reading, if they are sharded."""
    used_parts: Parts = NO_PARTS
    """Those that it uses."""
    num_bytes_read: int = 0
    """Bytes of weights that the member has read since it was loaded."""
    is_reading: bool = False
    """The member was ordered to use other parts, and has not answered."""
    hello: Hello | None = None
    is_loading: bool = False
    """The member was ordered to load the model."""
    is_loaded: bool = False
    num_heartbeats: int = 0
    num_missed_heartbeats: int | None = None
    """Seconds since the last message; None before the first."""
    progress: MemberProgress = field(default_factory=MemberProgress)
    num_late: int = 0
    """Consecutive epochs that the member has neither joined nor aborted in time."""
    loss_reason: str = ""
    """The reason why the member is lost or is being killed; empty for a healthy member."""

    @property
    def node(self) -> str:
        return self.hello.node if self.hello is not None else ""

    @property
    def is_silent(self) -> bool:
        return self.num_missed_heartbeats is None or self.num_missed_heartbeats > IS_SILENT

    def on_message(self, message: Hello | Loaded | WeightsReady | Heartbeat) -> None:
        """Update the state from a message. Raises ValueError for a message that is repeated or arrives too early."""
        match message:
            case Hello() if self.hello is None:
                self.hello = message
            case Loaded() if self.is_loading:
                self.is_loaded = True
            case WeightsReady() if self.is_reading:
                self.is_reading = False
                self.num_bytes_read += message.num_bytes
            case Heartbeat():
                self.progress = message.progress
                self.num_heartbeats += 1
            case _:
                raise ValueError(f"invalid message from member {self.number}: {type(message).__name__} out of order")
