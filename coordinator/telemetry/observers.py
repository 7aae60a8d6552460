"""Who is told of calls and of generations while they go on, to count, trace or log them."""

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
    """For instance `/longleaf.v1.GenerationService/Generate`."""
    peer: str
    metadata: Mapping[str, str]
    """What came in its headers, without what is binary and without credentials."""
    tenant: str = ""
    """Whose it is; empty until that is known."""
    request_id: str = ""
    """Of the generation that it runs, reads or cancels, inside the service."""
    context: str = ""
    """Id of the context that it is about, inside the service; of a fork the new one."""
    trace: str = ""
    """Id of the trace that it is part of, in 32 hexadecimal digits; empty when nobody traces."""
    field: str = ""
    """Which one of the request is wrong, if one is."""
    code: str = ""
    """How it ended: the name of gRPC's code, such as OK; empty while it goes on."""
    message: str = ""
    """What its client was told of that. It may quote what the client has sent."""
    error: str = ""
    """Type of the error that ended it, such as NotFound; empty if none did."""

    @property
    def host(self) -> str:
        """The peer without its port, such as `ipv4:10.0.0.1`."""
        return self.peer.rpartition(":")[0] or self.peer


CURRENT: ContextVar[CallRecord | None] = ContextVar("CURRENT", default=None)
"""The call for which code runs."""
Saw = Callable[[Event], None]


class Observer(Protocol):
    """Is told of everything that begins, and, by the end of the context, how it ended."""

    def call(self, record: CallRecord) -> AbstractContextManager[None]:
        """The time of a call. `record` is filled in meanwhile, with the code at last."""
        ...

    def generation(self, request_id: str, tenant: str) -> AbstractContextManager[Saw]:
        """The time in which the engine runs a generation, which may outlast its call. Left with the error that ended it
        early: CancelledError or GeneratorExit when its client went. What it gives is told each event."""
        ...


class Observers:
    """Several observers as one; none costs nothing."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    @contextmanager
    def call(self, record: CallRecord) -> Generator[None, None, None]:
        """As of each."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.call(record))
            yield

    @contextmanager
    def generation(self, request_id: str, tenant: str) -> Generator[Saw, None, None]:
        """As of each."""
        with ExitStack() as stack:
            reported = [stack.enter_context(observer.generation(request_id, tenant)) for observer in self._observers]

            def saw(event: Event) -> None:
                for tell in reported:
                    tell(event)

            yield saw


NOBODY = Observers()
