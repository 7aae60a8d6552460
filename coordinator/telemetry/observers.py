"""Observers of calls and generations, which count, trace or log them."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from coordinator.engine_messages import Event


@dataclass
class CallRecord:
    """One call of a client."""

    method: str
    """For example `/longleaf.v1.GenerationService/Generate`."""
    peer: str
    metadata: Mapping[str, str]
    """The text headers, without credentials."""
    tenant: str = ""
    """The tenant of the call; empty until it is known."""
    request_id: str = ""
    """Internal id of the generation that the call runs, reads or cancels."""
    context: str = ""
    """Internal id of the context of the call; for a fork, the new one."""
    trace: str = ""
    """The trace id in 32 hexadecimal digits; empty without tracing."""
    field: str = ""
    """The invalid field of the request, if any."""
    code: str = ""
    """The name of the gRPC status code, such as OK; empty while the call is running."""
    message: str = ""
    """The status message sent to the client. It may quote client input."""
    error: str = ""
    """Type of the error that ended the call, such as NotFound; empty if there was none."""

    @property
    def host(self) -> str:
        """The peer without its port, such as `ipv4:10.0.0.1`."""
        return self.peer.rpartition(":")[0] or self.peer


CURRENT: ContextVar[CallRecord | None] = ContextVar("CURRENT", default=None)
"""The call that the current code belongs to."""
EventSink = Callable[[Event], None]


class Observer(Protocol):
    """Is notified of the start of each call and generation, and of its end by the exit of the context manager."""

    def observe_call(self, record: CallRecord) -> AbstractContextManager[None]:
        """Spans a call. `record` is filled in meanwhile; the code is set last."""
        ...

    def observe_generation(self, request_id: str, tenant: str) -> AbstractContextManager[EventSink]:
        """Spans a generation in the engine, which may outlast its call. Exits with the error that ended it early:
        CancelledError or GeneratorExit when the client disconnected. The yielded function receives each event.
        """
        ...


class Observers:
    """Combines several observers into one."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    @contextmanager
    def observe_call(self, record: CallRecord) -> Generator[None, None, None]:
        """Enter the context of each observer."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.observe_call(record))
            yield

    @contextmanager
    def observe_generation(self, request_id: str, tenant: str) -> Generator[EventSink, None, None]:
        """Enter the context of each observer."""
        with ExitStack() as stack:
            sinks = [
                stack.enter_context(observer.observe_generation(request_id, tenant)) for observer in self._observers
            ]

            def on_event(event: Event) -> None:
                for sink in sinks:
                    sink(event)

            yield on_event


NO_OBSERVERS = Observers()
