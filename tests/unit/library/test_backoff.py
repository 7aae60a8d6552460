"""Exponential backoff."""

from longleaf.backoff import backoff_delay


def test_delay_doubles_up_to_the_longest_one() -> None:
    assert [backoff_delay(number, 0.5, 5.0) for number in range(1, 7)] == [0.5, 1, 2, 4, 5, 5]


def test_first_delay_is_limited_as_well() -> None:
    assert backoff_delay(1, 5.0, 2.0) == 2.0


def test_no_number_of_retries_overflows() -> None:
    assert backoff_delay(1 << 20, 0.25, 5.0) == 5.0
    assert backoff_delay(1 << 20, 0.0, 5.0) == 0.0
