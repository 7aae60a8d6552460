"""Lines of a log."""

import logging

import pytest

from longleaf.logs import REPEAT_SECONDS, JsonFormatter, LineFormatter, RepeatSuppressor, TextFormatter


def record(message: str, *arguments: object, error: bool = False) -> logging.LogRecord:
    failure = (ValueError, ValueError(), None) if error else None
    return logging.LogRecord("x", logging.WARNING, "", 0, message, arguments, failure)


def test_a_line_that_is_said_again_and_again_passes_once_in_a_while():
    now = 0.0
    repeats = RepeatSuppressor(lambda: now)
    assert repeats.filter(record("gone: %s", 1))
    assert not repeats.filter(record("gone: %s", 1))
    assert not repeats.filter(record("gone: %s", 2))  # whatever it says beside
    assert repeats.filter(record("back"))
    now = REPEAT_SECONDS
    assert repeats.filter(record("gone: %s", 2))
    assert not repeats.filter(record("gone: %s", 2))


def test_failures_are_each_told():
    repeats = RepeatSuppressor(lambda: 0.0)
    assert all(repeats.filter(record("failed", error=True)) for _ in range(3))


@pytest.mark.parametrize("formatter", [TextFormatter(), TextFormatter(is_plain=True), JsonFormatter()])
def test_no_text_of_a_client_begins_a_line(formatter: LineFormatter) -> None:
    """Nor does it write over one, or colour it."""
    forged = "u\nerror: forged\r\x1b[2J\x85\u2028error"
    line = record("upload %s is kept", forged)
    line.context = forged
    message = formatter.format(line)
    assert all(not each.startswith("error") for each in message.splitlines())
    assert all(each.isprintable() for each in message.split("\n"))
    assert "forged" in message
