"""Activation of evicted contexts: a request for an evicted context reloads it."""

from collections.abc import Generator
from contextlib import contextmanager

from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.recovery.recovery import RecoveryManager
from coordinator.scheduling.limits import JobLimits
from coordinator.scheduling.requests import Requests


class ContextActivation:
    """Activates contexts for requests, and evicts them again if the request is refused."""

    def __init__(
        self, contexts: ContextTable, requests: Requests, limits: JobLimits, recovery: RecoveryManager
    ) -> None:
        self._contexts = contexts
        self._requests = requests
        self._limits = limits
        self._recovery = recovery
        self._admitting: str | None = None
        """The context of the request that is being admitted."""

    @property
    def is_blocked(self) -> bool:
        """A context is protected from eviction only until the current admission ends."""
        return self._admitting is not None

    def in_use(self) -> set[str | None]:
        """Ids of contexts that jobs query or ingest into, including that of the request being admitted."""
        return {*self._requests.contexts, self._admitting}

    @contextmanager
    def activate(self, context: NamedContext | None) -> Generator[None, None, None]:
        """Activates an evicted context for the duration of an admission, and evicts it again if the request is
        refused."""
        was_resting = context is not None and context.is_evicted
        self._admitting = context.id if context else None
        try:
            if context is not None and was_resting:
                self._recovery.begin_reload(self._contexts.activate(context))
            yield
        except Exception:
            # deferred requests of the context may have been resumed meanwhile
            was_idle = context is not None and was_resting and context.id not in self._requests.contexts
            if context is not None and was_idle and not context.is_evicted:
                self._contexts.evict(context)
            raise
        finally:
            self._admitting = None

    def preload(self) -> list[Exception]:
        """Activates the most recently used contexts, as many as fit. Returns the errors of contexts that could not be
        activated and stay evicted."""
        contexts, faults = [context for context in self._contexts.list() if context.is_evicted], list[Exception]()
        for context in sorted(contexts, key=lambda context: -context.last_use):
            try:
                self._recovery.begin_reload(self._contexts.activate(context))
                has_room_left = self._has_room
            except Exception as error:
                faults.append(error)
                has_room_left = False
            if not has_room_left and not context.is_evicted:
                self._contexts.evict(context)
        return faults

    @property
    def _has_room(self) -> bool:
        """Whether all active contexts, and the window blocks for recomputation, fit at the same time."""
        active = (context.path.segments for context in self._contexts.list() if not context.is_evicted)
        return self._limits.fit_together({segment: None for segments in active for segment in segments})
