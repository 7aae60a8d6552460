"""All messages of the channel, and their encoding with msgpack."""

import msgspec

from longleaf.rank_protocol.group_messages import (
    AbortExchanges,
    GroupFailure,
    Join,
    KvLayout,
    OpenStore,
    Ready,
    StoreOpened,
)
from longleaf.rank_protocol.log_messages import Logged
from longleaf.rank_protocol.member_messages import Died, Heartbeat, Hello, Hold, Load, Loaded, Stop, WeightsReady
from longleaf.rank_protocol.snapshots import Discard, Fetch, Fetched, Save, Saved
from longleaf.rank_protocol.step import StepPlan, StepResult

ToRank = StepPlan | Load | Hold | OpenStore | Join | KvLayout | AbortExchanges | Save | Fetch | Discard | Stop

FromRank = (
    Hello
    | Loaded
    | WeightsReady
    | StoreOpened
    | Ready
    | StepResult
    | Saved
    | Fetched
    | GroupFailure
    | Died
    | Heartbeat
    | Logged
)

# created once, because creating a decoder takes ten times as long as decoding a plan
_TO_RANK = msgspec.msgpack.Decoder(ToRank)
_FROM_RANK = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """Raises msgspec.DecodeError on anything else."""
    return _TO_RANK.decode(data)


def decode_from_rank(data: bytes | memoryview) -> FromRank:
    """Raises msgspec.DecodeError on anything else."""
    try:
        return _FROM_RANK.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
