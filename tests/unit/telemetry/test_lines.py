"""Log lines as text and as JSON."""

import json
import logging
import re

import pytest

from coordinator.telemetry import logs
from coordinator.telemetry.observers import CURRENT, CallRecord
from longleaf.logs import JsonFormatter, TextFormatter
from longleaf.service_settings import TelemetryConfig

SECRET = "call me ishmael"
METHOD = "/longleaf.v1.GenerationService/Generate"


def record(message: str = "hello", error: BaseException | None = None, **facts: object) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("coordinator.x", logging.WARNING, "file.py", 1, message, None, exc_info)
    vars(made).update(facts)
    return made


def raised() -> Exception:
    output = SECRET
    try:
        try:
            raise KeyError(output)
        except KeyError as before:
            raise ValueError(f"cannot read {output}") from before
    except ValueError as error:
        return error


def test_json_line_has_time_level_logger_message_and_known_fields() -> None:
    line = JsonFormatter().format(
        record("a\nline of ünïcödé\u2028", rank=3, node="n1", epoch=2, tenant="", color="red")
    )
    assert "\n" not in line and line.isascii()
    answer = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", answer.pop("ts"))
    assert answer == {
        "level": "warning",
        "logger": "coordinator.x",
        "message": "a\nline of ünïcödé\u2028",
        "rank": 3,
        "node": "n1",
        "epoch": 2,
    }


def test_whole_seconds_have_milliseconds() -> None:
    made = record()
    made.created = 1_000_000_000.0
    assert json.loads(JsonFormatter().format(made))["ts"] == "2001-09-09T01:46:40.000Z"


def test_text_line_is_only_the_message_without_fields() -> None:
    assert TextFormatter().format(record()) == "hello"
    assert TextFormatter().format(record(node="n1", rank=0)) == "hello [rank 0, node n1]"


def test_invalid_unicode_does_not_break_a_line() -> None:
    assert json.loads(JsonFormatter().format(record("\udcff")))["message"] == "\udcff"


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_error_has_a_traceback_without_variable_values(
    formatter: logging.Formatter,
) -> None:
    text = formatter.format(record(error=raised()))
    assert "ValueError: cannot read call me ishmael" in text and "in raised" in text
    assert "said = 'call" not in text
    assert isinstance(formatter, TextFormatter) or "\n" not in text


@pytest.mark.parametrize("kind", [JsonFormatter, TextFormatter])
def test_error_messages_are_not_logged_during_a_call(kind: type[logging.Formatter]) -> None:
    token = CURRENT.set(CallRecord(METHOD, "ipv4:10.0.0.1:5", {}, tenant="acme", request_id="acme/one"))
    try:
        text = kind(logs.facts_of_call).format(record(error=raised()))
    finally:
        CURRENT.reset(token)
    assert "builtins.ValueError" in text and "builtins.KeyError" in text and "in raised" in text
    assert SECRET not in text


def test_cyclic_error_contexts_are_logged() -> None:
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    text = TextFormatter(lambda: {"method": METHOD}).format(record(error=first))
    assert (text.count("ValueError"), text.count("KeyError")) == (1, 1)


def test_lines_during_a_call_use_the_names_of_its_tenant() -> None:
    call = CallRecord(METHOD, "ipv4:10.0.0.1:5", {}, tenant="acme", request_id="acme/one", context="acme/book")
    token = CURRENT.set(call)
    try:
        answer = json.loads(logs.formatter(TelemetryConfig(log_format="json")).format(record(code="OK")))
    finally:
        CURRENT.reset(token)
    del answer["ts"], answer["level"], answer["logger"], answer["message"]
    assert answer == {"request": "one", "tenant": "acme", "method": METHOD, "code": "OK", "context": "book"}


@pytest.mark.parametrize(
    ("telemetry", "wanted"),
    [
        (TelemetryConfig(), "hello [code OK]"),
        (TelemetryConfig(log_level="error"), f"hello [tenant acme, method {METHOD}, code OK]"),
    ],
)
def test_default_text_lines_omit_call_fields(telemetry: TelemetryConfig, wanted: str) -> None:
    token = CURRENT.set(CallRecord(METHOD, "ipv4:10.0.0.1:5", {}, tenant="acme"))
    try:
        message = logs.formatter(telemetry).format(record(code="OK", error=raised()))
    finally:
        CURRENT.reset(token)
    line, _, error = message.partition("\n")
    assert line == wanted
    assert "ValueError" in error and SECRET not in error


@pytest.mark.parametrize(("log_format", "wanted"), [("text", "hello\n"), ("json", '"message": "hello"')])
def test_process_logs_each_line_once_from_its_level(
    log_format: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, others = logging.getLogger("coordinator.some.place"), logging.getLogger("of.a.library")
    before = list(logging.getLogger().handlers), logging.getLogger("coordinator").level
    up = logs.set_up(TelemetryConfig(log_format=log_format, log_level="info"))  # type: ignore[arg-type]
    try:
        mine.debug("too fine")
        others.info("too fine")
        mine.info("hello")
        others.warning("hello")
    finally:
        up.take_down()
    output = capsys.readouterr().err
    assert (output.count(wanted), len(output.splitlines())) == (2, 2), output
    assert (list(logging.getLogger().handlers), logging.getLogger("coordinator").level) == before


def test_startup_notes_are_log_lines() -> None:
    assert logs.format_start_notes(TelemetryConfig(), ["a note"]) == ("a note",)
    (line,) = logs.format_start_notes(TelemetryConfig(log_format="json", log_level="error"), ["a note"])
    answer = json.loads(line)
    assert (answer["level"], answer["logger"], answer["message"]) == ("info", "coordinator.notes", "a note")
