"""The status of recoveries for clients: the progress, and the contexts that were dropped."""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from coordinator.engine_messages import ContextDropped
from longleaf.errors import CheckpointChanged, ContextLost, NotFound
from longleaf.formatting import human_seconds
from longleaf.types import Recovering, Recovery

MAX_REMEMBERED = 100
"""Dropped contexts whose reasons are remembered."""
PREFIX = "contexts/"
log = logging.getLogger(__name__)


class RecoveryStatus:
    """The running recovery, or the last one. `clock` measures seconds; `changed` maps contexts that another checkpoint
    has read to the differences.
    """

    def __init__(self, clock: Callable[[], float], changed: Mapping[str, str] | None = None) -> None:
        self._clock = clock
        self._changed = dict(changed or {})
        self._began = 0.0
        self._latest: Recovery | None = None
        self._reasons: dict[str, str] = {}
        """The reasons why contexts were dropped, by id."""

    def begin(self, epoch: int, lost_at: float) -> None:
        """Start a recovery in an epoch after a loss. Unfinished recovery of an earlier epoch becomes part of it."""
        if self._latest is None or self._latest.is_done:
            self._began = lost_at
            self._latest = Recovery(epoch=epoch, lost_tokens=0, recovered_tokens=0, seconds=0.0, is_done=False)

    def update(self, progress: Recovering | None, dropped: Sequence[ContextDropped]) -> None:
        """Record the progress; None when nothing is lost any more."""
        gone = {one.context: one.reason for one in dropped}
        self._reasons = dict([*self._reasons.items(), *gone.items()][-MAX_REMEMBERED:])
        for one in dropped:
            log.warning("dropped context %s with %s tokens: %s", one.context, f"{one.num_tokens:,}", one.reason)
        if (latest := self._latest) is None or latest.is_done:
            return
        lost = latest.lost_tokens if progress is None else progress.total_tokens
        self._latest = Recovery(
            epoch=latest.epoch,
            lost_tokens=lost,
            recovered_tokens=lost if progress is None else progress.recovered_tokens,
            seconds=self._clock() - self._began,
            is_done=progress is None,
            dropped_contexts=tuple([*latest.dropped_contexts, *gone][-MAX_REMEMBERED:]),
        )
        self._log(latest, self._latest)

    @staticmethod
    def _log(before: Recovery, now: Recovery) -> None:
        """Log a loss and the end of the recovery for the operator."""
        if now.lost_tokens > before.lost_tokens:
            log.warning("recovering %s lost tokens", f"{now.lost_tokens:,}")
        if now.is_done and now.lost_tokens:
            but = f"; dropped contexts: {len(now.dropped_contexts)}" if now.dropped_contexts else ""
            log.warning("recovered %s lost tokens in %s%s", f"{now.lost_tokens:,}", human_seconds(now.seconds), but)

    @property
    def latest(self) -> Recovery | None:
        """The current state; None if no rank was lost."""
        return self._latest

    @contextmanager
    def explaining(self) -> Generator[None, None, None]:
        """Convert NotFound into ContextLost for a context that was dropped, and into CheckpointChanged for one of
        another checkpoint.
        """
        try:
            yield
        except NotFound as error:
            name = error.name.removeprefix(PREFIX)
            if (reason := self._reasons.get(name)) is not None:
                raise ContextLost(error.name, reason) from error
            if (changes := self._changed.get(name)) is not None:
                raise CheckpointChanged(error.name, changes) from error
            raise

    def forget(self, context_id: str) -> None:
        """Forget the earlier loss of a name that is in use again."""
        self._reasons.pop(context_id, None)
        self._changed.pop(context_id, None)
