"""The scheduler's operations on contexts and documents. Pure."""

from coordinator.engine_messages import Acknowledged, Outcome
from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.scheduling.context_activation import ContextActivation
from coordinator.scheduling.job_lifecycle import JobLifecycle
from coordinator.scheduling.job_recovery import JobRecovery
from coordinator.scheduling.jobs import IngestJob
from coordinator.scheduling.requests import Requests
from longleaf.errors import AlreadyExists


class ContextOperations:
    """The part of a scheduler that manages contexts. Times called `now` are in seconds since the epoch."""

    contexts: ContextTable
    _faults: list[Exception]
    _job_recovery: JobRecovery
    _lifecycle: JobLifecycle
    _outcomes: list[Outcome]
    _requests: Requests
    _activation: ContextActivation

    def sealed(self, request_id: int) -> IngestJob | None:
        """The document that waits to be acknowledged; None if its ingest has ended since."""
        request = self._requests.get(request_id)
        job = request.jobs[0] if request else None
        return job if isinstance(job, IngestJob) and job.prefill.is_over else None

    def acknowledge(self, request_id: int, now: float) -> bool:
        """Creates the context of a Sealed document once the document is durable; `now` is in seconds since the epoch.
        Returns False if its ingest has ended since. See `drain`."""
        if (job := self.sealed(request_id)) is None:
            return False
        self._acknowledge(job, now)
        return True

    def is_ingesting_into(self, context_id: str) -> bool:
        """Whether a document is being ingested into a context, which may not exist yet."""
        return bool(self._requests.ingests_into(context_id))

    def preload(self) -> None:
        """Activates the most recently used contexts, as many as fit."""
        self._faults += self._activation.preload(self._job_recovery.begin_reload, lambda: self._job_recovery.has_room)

    def _acknowledge(self, job: IngestJob, now: float) -> None:
        document = job.document
        segment, capacity = job.tail.segment, job.request.capacity
        self.contexts.append(document.context, segment, now, document.settings, capacity, document.upload_id)
        self._outcomes.append((job.request.id, Acknowledged(document.context)))
        self._lifecycle.finish(job)

    def fork_context(
        self, source: str, context_id: str, num_tokens: int | None = None, now: float = 0.0
    ) -> NamedContext:
        """Creates a context from the first `num_tokens` tokens of another, by default all. The two are then
        independent.

        Raises NotFound, AlreadyExists, InvalidArgument naming token_count, or Unavailable.
        """
        if self._requests.ingests_into(context_id):
            raise AlreadyExists(f"contexts/{context_id}")
        return self.contexts.fork(source, context_id, num_tokens, now)

    def delete_context(self, context_id: str) -> list[int]:
        """Deletes a context and cancels the ingests into it. Returns the ids of these ingests. Raises NotFound."""
        self.contexts.delete(context_id)
        self._lifecycle.mark_changed()
        return [
            request_id for request_id in self._requests.ingests_into(context_id) if self._lifecycle.cancel(request_id)
        ]

    @property
    def next_expiry(self) -> float | None:
        """Time of the next expiry of a context, including contexts that are still being ingested; None if none
        expires."""
        times = (self.contexts.next_expiry, self._requests.expiries.next)
        return min((time for time in times if time is not None), default=None)

    def expire_ingests(self, now: float) -> list[int]:
        """Cancels the ingests whose contexts would have expired at `now`, in seconds since the epoch. Returns their
        ids."""
        return [request_id for request_id in self._requests.expiries.passed(now) if self._lifecycle.cancel(request_id)]
