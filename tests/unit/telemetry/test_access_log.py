"""Log lines of calls; a flood of refused calls is logged as a number."""

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context

import pytest

from coordinator.telemetry.access_log import AccessLog
from coordinator.telemetry.observers import CURRENT, CallRecord
from coordinator.telemetry.refusal_log import FIRST_PER_HOST, MAX_HOSTS, call_later
from longleaf.logs import FACTS

GET = "/longleaf.v1.ContextService/GetContext"
DELETE = "/longleaf.v1.ContextService/DeleteContext"


class ManualClock:
    """A manual clock with timers."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self._timers.append((self.now + seconds, callback))
        loop = asyncio.get_running_loop()
        return asyncio.TimerHandle(0.0, callback, (), loop, Context())

    def move(self, seconds: float) -> None:
        self.now += seconds
        due = [callback for when, callback in self._timers if when <= self.now]
        self._timers = [(when, callback) for when, callback in self._timers if when > self.now]
        for callback in due:
            callback()


def one(log: AccessLog, method: str = GET, code: str = "OK", host: str = "10.0.0.1", **facts: str) -> None:
    record = CallRecord(method, f"ipv4:{host}:4711", {}, **facts)
    with log.observe_call(record):
        record.code = code


def lines(caplog: pytest.LogCaptureFixture, logger: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == logger]


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator")


async def test_call_is_one_line_with_all_fields(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    record = CallRecord(GET, "ipv6:[::1]:4711", {}, tenant="acme", trace="ab" * 16)
    with AccessLog(lambda: clock.now, clock.later).observe_call(record):
        record.request_id, record.context = "acme/one", "acme/book"
        record.code, record.error, record.field = "INVALID_ARGUMENT", "InvalidArgument", "text"
        record.message = "text: 'a secret' is wrong"
        clock.move(1.25)
    (line,) = caplog.records
    assert (line.name, line.levelname, line.getMessage()) == (
        "coordinator.auth",
        "INFO",
        "call ended with InvalidArgument",
    )
    assert {name: value for name, value in vars(line).items() if name in FACTS} == {
        "method": GET,
        "code": "INVALID_ARGUMENT",
        "field": "text",
        "tenant": "acme",
        "request": "one",
        "context": "book",
        "host": "ipv6:[::1]",
        "seconds": 1.25,
        "trace": "ab" * 16,
    }


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("secret")])
async def test_call_that_raises_is_logged(caplog: pytest.LogCaptureFixture, error: BaseException) -> None:
    with pytest.raises(type(error)), AccessLog().observe_call(CallRecord(GET, "ipv4:1.1.1.1:1", {}, code="CANCELLED")):
        raise error
    assert [line.getMessage() for line in caplog.records] == ["call ended"]


@pytest.mark.parametrize(
    ("code", "is_audited"),
    [("OK", True), ("UNAVAILABLE", True), ("CANCELLED", True), ("NOT_FOUND", False), ("INVALID_ARGUMENT", False)],
)
async def test_deletions_are_audited_unless_nothing_was_deleted(
    caplog: pytest.LogCaptureFixture, code: str, is_audited: bool
) -> None:
    one(AccessLog(), DELETE, code, tenant="acme", context="acme/book")
    audited = lines(caplog, "coordinator.audit")
    assert len(audited) == is_audited
    assert all((line.levelname, line.context) == ("WARNING", "book") for line in audited)  # type: ignore[attr-defined]


async def test_flood_of_refused_calls_is_logged_per_host_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    log = AccessLog(lambda: clock.now, clock.later)
    for second in range(3):
        for _ in range(10_000):
            one(log, code="UNAUTHENTICATED")
        one(log, code="PERMISSION_DENIED")
        clock.move(1.0)
        printed = [line.getMessage() for line in lines(caplog, "coordinator.audit")]
        assert len(printed) == FIRST_PER_HOST + second + 1
        count = 10_000 - (0 if second else FIRST_PER_HOST)
        assert printed[-1] == f"further calls were refused: 1 with PERMISSION_DENIED, {count:,} with UNAUTHENTICATED"
    assert len(lines(caplog, "coordinator.auth")) == FIRST_PER_HOST
    one(log, code="OK")
    assert len(lines(caplog, "coordinator.auth")) == FIRST_PER_HOST + 1, "accepted calls are not counted among them"


async def test_flood_from_many_addresses_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = AccessLog(lambda: clock.now, clock.later)
    for number in range(10_000):
        one(log, code="UNAUTHENTICATED", host=f"10.0.{number // 250}.{number % 250}")
    assert len(lines(caplog, "coordinator.audit")) == MAX_HOSTS
    clock.move(61)
    assert lines(caplog, "coordinator.audit")[-1].getMessage().endswith(f"{10_000 - MAX_HOSTS:,} with UNAUTHENTICATED")
    one(log, code="UNAUTHENTICATED", host="10.9.9.9")
    assert lines(caplog, "coordinator.audit")[-1].host == "ipv4:10.9.9.9", "a minute later others are logged again"  # type: ignore[attr-defined]


async def test_counted_refusals_are_logged_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog()
    for _ in range(FIRST_PER_HOST + 2):
        one(log, code="UNAUTHENTICATED")
    await log.stop()
    assert [line.getMessage() for line in lines(caplog, "coordinator.audit")][FIRST_PER_HOST:] == [
        "further calls were refused: 2 with UNAUTHENTICATED"
    ]
    await log.stop()
    assert len(lines(caplog, "coordinator.audit")) == FIRST_PER_HOST + 1


async def test_timer_runs_outside_the_context_of_a_call() -> None:
    found = asyncio.get_running_loop().create_future()
    token = CURRENT.set(CallRecord(GET, "ipv4:1.1.1.1:1", {}))
    try:
        call_later(0, lambda: found.set_result(CURRENT.get()))
    finally:
        CURRENT.reset(token)
    assert await asyncio.wait_for(found, 5) is None
