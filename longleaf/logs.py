"""Lines of a log: for people, or one JSON object each. What clients ask and are answered is in none of them."""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from traceback import format_exception, format_tb

from longleaf.service_settings import TelemetryConfig

Facts = Mapping[str, object]
"""What is known of where a line comes from, by the names in FACTS; what is not known is left out, or empty."""
FACTS = tuple("request tenant trace rank node epoch method code field context host seconds".split())
REPEAT_SECONDS = 60.0
"""How soon a line is told again that says the same."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def nothing() -> Facts:
    """What is known outside of calls and ranks."""
    return {}


class LineFormatter(logging.Formatter):
    """Knows the facts of a record: those that it was given as `extra`, and those that hold while it is formatted."""

    def __init__(self, facts: Callable[[], Facts] = nothing) -> None:
        super().__init__()
        self._facts = facts

    def facts_of(self, record: logging.LogRecord) -> dict[str, str | int | float]:
        """In the order of FACTS, those alone that are known."""
        return _known({**self._facts(), **_known(vars(record))})

    def error_of(self, record: logging.LogRecord) -> str:
        """The traceback of what was raised, without what variables held; empty if nothing was.

        While a call is served messages are left out as well: they may quote what the client has sent.
        """
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return ""
        is_of_call = bool(self.facts_of(record).get("method"))
        return _without_messages(error) if is_of_call else "".join(format_exception(error)).rstrip("\n")


class JsonFormatter(LineFormatter):
    """One object per record, on one line, in ASCII."""

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
    """The message, and the facts after it in brackets, if there are any. `is_plain`: those alone that a record was
    given."""

    def __init__(self, facts: Callable[[], Facts] = nothing, is_plain: bool = False) -> None:
        super().__init__(facts)
        self._is_plain = is_plain

    def format(self, record: logging.LogRecord) -> str:
        shown = _known(vars(record)) if self._is_plain else self.facts_of(record)
        facts = ", ".join(f"{name} {fact}" for name, fact in shown.items())
        error = self.error_of(record)
        return _escaped(record.getMessage() + (f" [{facts}]" if facts else "")) + (f"\n{error}" if error else "")


def _escaped(text: str) -> str:
    """The text without control characters, its further lines indented: what a client has chosen of it can neither look
    like a line of the log nor write over one."""
    if text.isprintable():
        return text
    lines = ("".join(map(_escaped_character, line)) for line in text.split("\n"))
    return "\n  ".join(lines)


def _escaped_character(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _without_messages(error: BaseException) -> str:
    """Where it was raised, and what came before it."""
    reported, chain = list[str](), [error]
    while True:
        error = chain[-1]
        kind = type(error)
        places = "".join(format_tb(error.__traceback__))
        reported.append(f"{places}{kind.__module__}.{kind.__qualname__}: its message is not logged")
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or any(before is each for each in chain):
            return "\nraised after:\n".join(reported)
        chain.append(before)


def formatter_of(config: TelemetryConfig, facts: Callable[[], Facts] = nothing) -> LineFormatter:
    """That of the format which the settings ask for."""
    return JsonFormatter(facts) if config.log_format == "json" else TextFormatter(facts, config.has_plain_log)


class RepeatSuppressor(logging.Filter):
    """Of a logger's lines that say the same thing, whatever about, lets one pass in `REPEAT_SECONDS`: calls must not
    fill a log. Failures pass, each is another one."""

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
    """Has a process log on standard error as the settings say: what `loggers` and all below them say from their level
    on, and of everybody else what is no less important than a warning. To be taken down once."""

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
        if self._has_warnings:  # Python's own would stand between the objects
            logging.captureWarnings(True)

    def take_down(self) -> None:
        """All is as before."""
        logging.getLogger().removeHandler(self._handler)
        for logger, level in self._loggers:
            logger.setLevel(level)
        if self._has_warnings:
            logging.captureWarnings(False)
