"""Contexts that rest, as far as requests have to do with it: who asks one wakes it."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.kv_cache.segment_placement import SegmentPlacement
from coordinator.scheduling.requests import Requests

Call = Callable[[Sequence[SegmentPlacement]], None]
"""Has what is parked be read again; each comes after what it continues."""


class ContextActivation:
    """Wakes contexts, and has those rest again that nobody needs."""

    def __init__(self, contexts: ContextTable, requests: Requests) -> None:
        self._contexts = contexts
        self._requests = requests
        self._admitting: str | None = None
        """The context of a request that is being admitted."""

    @property
    def is_held_up(self) -> bool:
        """A context may not rest now, and perhaps may in a moment."""
        return self._admitting is not None

    def in_use(self) -> set[str | None]:
        """Ids of contexts that jobs ask, or read into."""
        return {*self._requests.contexts, self._admitting}

    @contextmanager
    def called(self, context: NamedContext | None, call: Call) -> Generator[None, None, None]:
        """Has a context that rests come back, unless who asks it is refused meanwhile."""
        was_resting = context is not None and context.is_resting
        self._admitting = context.id if context else None
        try:
            if context is not None and was_resting:
                call(self._contexts.wake(context))
            yield
        except Exception:
            if context is not None and was_resting and not context.is_resting:
                self._contexts.rest(context)
            raise
        finally:
            self._admitting = None

    def warm(self, call: Call, has_room: Callable[[], bool]) -> list[Exception]:
        """Has the contexts come back that were used last, as many as there is room for. Gives the errors of those that
        cannot be activated: they rest on."""
        contexts, faults = [context for context in self._contexts.list() if context.is_resting], list[Exception]()
        for context in sorted(contexts, key=lambda context: -context.last_use):
            try:
                call(self._contexts.wake(context))
                has_room_left = has_room()
            except Exception as error:
                faults.append(error)
                has_room_left = False
            if not has_room_left and not context.is_resting:
                self._contexts.rest(context)
        return faults
