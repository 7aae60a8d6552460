"""Access log: a line per call, and lines for auditors."""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from coordinator.engine_messages import Event
from coordinator.telemetry.observers import CallRecord, EventSink
from coordinator.telemetry.refusal_log import Later, RefusalLog, call_later
from longleaf.tenants import name_of

access = logging.getLogger("coordinator.auth")
audit = logging.getLogger("coordinator.audit")
AUDITED = {
    "/longleaf.v1.ContextService/DeleteContext": "deletion of a context",
    "/longleaf.v1.ClusterService/Drain": "drain",
    "/longleaf.v1.ClusterService/RefillSlots": "refill of slots",
}
"""Calls that delete or revoke resources, or change the ranks."""
REFUSED = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
UNDONE = frozenset({"NOT_FOUND", "INVALID_ARGUMENT"})
"""Codes of calls that had no effect."""


class AccessLog:
    """An observer that writes a line when a call ends. Needs a running event loop. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, later: Later = call_later) -> None:
        self._clock = clock
        self._refused = RefusalLog(lambda reported: audit.warning("%s", reported), clock, later)

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Logs the number of calls refused since the last such line."""
        self._refused.stop()

    @contextmanager
    def call(self, record: CallRecord) -> Generator[None, None, None]:
        """Logs the call when it ends."""
        began = self._clock()
        try:
            yield
        finally:
            self._write(record, self._clock() - began)

    @contextmanager
    def generation(self, request_id: str, tenant: str) -> Generator[EventSink, None, None]:
        """Writes nothing: the line of the call is enough."""
        yield _ignore

    def _write(self, record: CallRecord, seconds: float) -> None:
        is_refused = record.code in REFUSED
        if is_refused and not self._refused.note(record.host, record.code):
            return
        facts = facts_of(record, seconds)
        access.info("call ended%s", f" with {record.error}" if record.error else "", extra=facts)
        if is_refused:
            audit.warning("call refused", extra=facts)
        elif record.method in AUDITED and record.code not in UNDONE:
            audit.warning("%s", AUDITED[record.method], extra=facts)


def _ignore(_: Event) -> None:
    """Fields of a generation."""


def facts_of(record: CallRecord, seconds: float) -> dict[str, object]:
    """Fields of a call's log lines. Names are those that the tenant uses."""
    return {
        "method": record.method,
        "code": record.code,
        "field": record.field,
        "tenant": record.tenant,
        "request": name_of(record.request_id),
        "context": name_of(record.context),
        "host": record.host,
        "seconds": round(seconds, 6),
        "trace": record.trace,
    }
