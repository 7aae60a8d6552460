"""Log formats: text for people, or one JSON object per line. Prompts and answers are never logged."""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from traceback import format_exception, format_tb

from longleaf.service_settings import TelemetryConfig

Facts = Mapping[str, object]
"""Attributes of a log line by their names in FACTS; unknown ones are absent or empty."""
FACTS = tuple("request tenant trace rank node epoch method code field context host seconds".split())
REPEAT_SECONDS = 60.0
"""Minimum interval between repetitions of a log line."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def nothing() -> Facts:
    """No facts, for lines outside of calls and ranks."""
    return {}


class LineFormatter(logging.Formatter):
    """Collects the facts of a record: its `extra` fields, and those of the current context."""

    def __init__(self, facts: Callable[[], Facts] = nothing) -> None:
        super().__init__()
        self._facts = facts

    def facts_of(self, record: logging.LogRecord) -> dict[str, str | int | float]:
        """The known facts, in the order of FACTS."""
        return _known({**self._facts(), **_known(vars(record))})

    def error_of(self, record: logging.LogRecord) -> str:
        """The traceback of the logged exception, without values of variables; empty without exception.

        While a call is served, exception messages are omitted too, because they may quote data of the client.
        """
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return ""
        is_of_call = bool(self.facts_of(record).get("method"))
        return _without_messages(error) if is_of_call else "".join(format_exception(error)).rstrip("\n")


class JsonFormatter(LineFormatter):
    """One ASCII JSON object per record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        event = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "ts": event.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.facts_of(record),
        }
        if error := self.error_of(record):
            line["error"] = error
        return json.dumps(line)


def _known(facts: Facts) -> dict[str, str | int | float]:
    """In the order of FACTS."""
    found = ((name, facts.get(name, "")) for name in FACTS)
    return {name: fact for name, fact in found if isinstance(fact, str | int | float) and fact != ""}


class TextFormatter(LineFormatter):
    """The message, followed by its facts in brackets. With `is_plain`, only the record's `extra` facts."""

    def __init__(self, facts: Callable[[], Facts] = nothing, is_plain: bool = False) -> None:
        super().__init__(facts)
        self._is_plain = is_plain

    def format(self, record: logging.LogRecord) -> str:
        shown = _known(vars(record)) if self._is_plain else self.facts_of(record)
        facts = ", ".join(f"{name} {fact}" for name, fact in shown.items())
        error = self.error_of(record)
        return _escaped(record.getMessage() + (f" [{facts}]" if facts else "")) + (f"\n{error}" if error else "")


def _escaped(text: str) -> str:
    """The text without control characters and with further lines indented, so that text from a client can neither
    imitate nor overwrite log lines."""
    if text.isprintable():
        return text
    lines = ("".join(map(_escaped_character, line)) for line in text.split("\n"))
    return "\n  ".join(lines)


def _escaped_character(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _without_messages(error: BaseException) -> str:
    """The traceback with all chained exceptions, without their messages."""
    lines, chain = list[str](), [error]
    while True:
        error = chain[-1]
        kind = type(error)
        places = "".join(format_tb(error.__traceback__))
        lines.append(f"{places}{kind.__module__}.{kind.__qualname__}: its message is not logged")
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or any(before is each for each in chain):
            return "\nraised after:\n".join(lines)
        chain.append(before)


def formatter_of(config: TelemetryConfig, facts: Callable[[], Facts] = nothing) -> LineFormatter:
    """The formatter for the configured log format."""
    return JsonFormatter(facts) if config.log_format == "json" else TextFormatter(facts, config.has_plain_log)


class RepeatSuppressor(logging.Filter):
    """Suppresses repeated lines: each message template passes once in `REPEAT_SECONDS`, whatever its arguments, so that
    calls cannot flood the log. Lines with exceptions always pass."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._passed = clock, dict[str, float]()

    def filter(self, record: logging.LogRecord) -> bool:
        now, thing = self._clock(), str(record.msg)
        if record.exc_info or now - self._passed.get(thing, -math.inf) >= REPEAT_SECONDS:
            self._passed[thing] = now
            return True
        return False


class Logs:
    """Configures logging to standard error: lines of `loggers` from the configured level on, and warnings of all
    others, until `take_down`."""

    def __init__(self, config: TelemetryConfig, loggers: Sequence[str], facts: Callable[[], Facts] = nothing) -> None:
        level = LEVELS[config.log_level]
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(formatter_of(config, facts))
        self._handler.setLevel(level)
        self._loggers = [(logger, logger.level) for logger in map(logging.getLogger, loggers)]
        for logger, _ in self._loggers:
            logger.setLevel(level)
        logging.getLogger().addHandler(self._handler)
        self._has_warnings = config.log_format == "json"
        if self._has_warnings:  # Python's own handler would print plain lines between the JSON objects
            logging.captureWarnings(True)

    def take_down(self) -> None:
        """Restores the previous logging configuration."""
        logging.getLogger().removeHandler(self._handler)
        for logger, level in self._loggers:
            logger.setLevel(level)
        if self._has_warnings:
            logging.captureWarnings(False)
