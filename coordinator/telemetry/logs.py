"""Logging of the coordinator."""

import logging
from collections.abc import Sequence

from coordinator.telemetry.observers import CURRENT
from longleaf.launch import ERROR, labeled
from longleaf.logs import Facts, JsonFormatter, LineFormatter, Logs, formatter_of
from longleaf.service_settings import TelemetryConfig
from longleaf.tenants import name_of

LOGGERS = ("coordinator", "longleaf")
"""The loggers whose level is configured."""
NOTES = "coordinator.notes"


def facts_of_call() -> Facts:
    """Fields of the current call. Names are those that the tenant uses."""
    call = CURRENT.get()
    if call is None:
        return {}
    return {
        "request": name_of(call.request_id),
        "tenant": call.tenant,
        "trace": call.trace,
        "method": call.method,
        "code": call.code,
        "field": call.field,
        "context": name_of(call.context),
    }


def set_up(config: TelemetryConfig) -> Logs:
    """Configures logging of this process from the settings. `Logs.take_down` ends it."""
    return Logs(config, LOGGERS, facts_of_call)


def formatter(config: TelemetryConfig) -> LineFormatter:
    """For messages that appear elsewhere than on this process's standard error."""
    return formatter_of(config, facts_of_call)


def format_start_notes(config: TelemetryConfig, texts: Sequence[str]) -> tuple[str, ...]:
    """Formats notes about a start as log lines, which appear at every log level."""
    return tuple(texts) if config.log_format == "text" else tuple(_line(logging.INFO, text) for text in texts)


def summarized(config: TelemetryConfig, rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The summary of a start: aligned lines for people, or lines of the log."""
    if config.log_format == "text":
        return tuple(labeled(label, text) for label, text in rows)
    return tuple(_line(logging.INFO, f"{label}: {text}") for label, text in rows)


def failed(config: TelemetryConfig, error: str) -> str:
    """Formats the error that ended a service as a log line."""
    return f"{ERROR}{error}" if config.log_format == "text" else _line(logging.ERROR, error)


def _line(level: int, text: str) -> str:
    return JsonFormatter().format(logging.LogRecord(NOTES, level, "", 0, text, None, None))
