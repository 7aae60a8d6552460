"""Conversion of seconds to protobuf times, and its rounding."""

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from longleaf.codec.times import decode_seconds, encode_duration, encode_lifetime, encode_measured, encode_time


@pytest.mark.parametrize(("seconds", "nanos"), [(0.9999999, 999_999_000), (1.5, 500_000_000), (4.0000009, 0)])
def test_encoded_time_is_never_later(seconds: float, nanos: int) -> None:
    assert encode_time(seconds) == Timestamp(seconds=int(seconds), nanos=nanos)
    assert encode_lifetime(seconds) == Duration(seconds=int(seconds), nanos=nanos)


def test_time_before_the_epoch_is_floored_and_lifetime_is_truncated() -> None:
    assert encode_time(-0.25) == Timestamp(seconds=-1, nanos=750_000_000)
    assert encode_lifetime(-0.25) == Duration(nanos=-250_000_000)


def test_durations_are_rounded_to_the_nearest() -> None:
    assert encode_duration(2.0000007) == Duration(seconds=2, nanos=1000)
    assert encode_measured(2.0000000007) == Duration(seconds=2, nanos=1)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1.1, 2.000001, 8.41, 86400.123456, 1_700_000_000.123456])
def test_whole_microseconds_round_trip(seconds: float) -> None:
    assert decode_seconds(encode_duration(seconds)) == pytest.approx(seconds, abs=2e-7 if seconds > 1e9 else 0)


def test_invalid_times_are_decoded() -> None:
    assert decode_seconds(Duration(seconds=2**62, nanos=-5)) == pytest.approx(2**62)
