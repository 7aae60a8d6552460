"""Log lines."""

import logging

import pytest

from longleaf.logs import REPEAT_SECONDS, JsonFormatter, LineFormatter, RepeatSuppressor, TextFormatter


def record(message: str, *arguments: object, error: bool = False) -> logging.LogRecord:
    failure = (ValueError, ValueError(), None) if error else None
    return logging.LogRecord("x", logging.WARNING, "", 0, message, arguments, failure)


def test_repeated_line_is_logged_once_per_interval():
    now = 0.0
    repeats = RepeatSuppressor(lambda: now)
    assert repeats.filter(record("gone: %s", 1))
    assert not repeats.filter(record("gone: %s", 1))
    assert not repeats.filter(record("gone: %s", 2))  # the arguments do not matter
    assert repeats.filter(record("back"))
    now = REPEAT_SECONDS
    assert repeats.filter(record("gone: %s", 2))
    assert not repeats.filter(record("gone: %s", 2))


def test_every_error_is_logged():
    repeats = RepeatSuppressor(lambda: 0.0)
    assert all(repeats.filter(record("failed", error=True)) for _ in range(3))


@pytest.mark.parametrize("formatter", [TextFormatter(), TextFormatter(is_plain=True), JsonFormatter()])
def test_client_text_cannot_begin_a_line(formatter: LineFormatter) -> None:
    """Client text cannot overwrite or colour a line either."""
    forged = "u\nerror: forged\r\x1b[2J\x85\u2028error"
    line = record("upload %s is kept", forged)
    line.context = forged
    message = formatter.format(line)
    assert all(not each.startswith("error") for each in message.splitlines())
    assert all(each.isprintable() for each in message.split("\n"))
    assert "forged" in message
