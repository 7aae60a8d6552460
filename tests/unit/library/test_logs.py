"""Lines of a log."""

import logging

from longleaf.logs import REPEAT_SECONDS, Repeats


def record(message: str, *arguments: object, error: bool = False) -> logging.LogRecord:
    failure = (ValueError, ValueError(), None) if error else None
    return logging.LogRecord("x", logging.WARNING, "", 0, message, arguments, failure)


def test_a_line_that_is_said_again_and_again_passes_once_in_a_while():
    now = 0.0
    repeats = Repeats(lambda: now)
    assert repeats.filter(record("gone: %s", 1))
    assert not repeats.filter(record("gone: %s", 1))
    assert not repeats.filter(record("gone: %s", 2))  # whatever it says beside
    assert repeats.filter(record("back"))
    now = REPEAT_SECONDS
    assert repeats.filter(record("gone: %s", 2))
    assert not repeats.filter(record("gone: %s", 2))


def test_failures_are_each_told():
    repeats = Repeats(lambda: 0.0)
    assert all(repeats.filter(record("failed", error=True)) for _ in range(3))
