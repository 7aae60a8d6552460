"""Conversion between seconds and protobuf's Timestamp and Duration."""

import math
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def encode_time(seconds: float) -> Timestamp:
    """`seconds` since the Unix epoch, rounded down to a microsecond."""
    whole = math.floor(seconds)
    return Timestamp(seconds=whole, nanos=_microseconds(seconds - whole) * 1000)


def encode_lifetime(seconds: float) -> Duration:
    """Rounded down to a microsecond."""
    whole = math.trunc(seconds)
    return Duration(seconds=whole, nanos=_microseconds(seconds - whole) * 1000)


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)


def encode_duration(seconds: float) -> Duration:
    """Rounded to the nearest microsecond."""
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration


def encode_measured(seconds: float) -> Duration:
    """Rounded to the nearest nanosecond."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def decode_seconds(time: Timestamp | Duration) -> float:
    """The nearest float, also for messages that protobuf considers out of range."""
    return (time.seconds * 10**9 + time.nanos) / 10**9
