"""All messages of the channel, and their encoding with msgpack."""

import msgspec

from longleaf.channel.lives import Died, Heartbeat, Hello, Join, Ready, Stop
from longleaf.channel.step import StepPlan, StepResult

ToRank = StepPlan | Join | Stop

FromRank = Hello | Ready | StepResult | Died | Heartbeat


def encode(message: ToRank | FromRank) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """Raises msgspec.DecodeError on anything else."""
    return msgspec.msgpack.decode(data, type=ToRank)


def decode_from_rank(data: bytes | memoryview) -> FromRank:
    """Raises msgspec.DecodeError on anything else."""
    try:
        return msgspec.msgpack.decode(data, type=FromRank)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
