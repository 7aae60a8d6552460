"""Waiting and running jobs, and how they start and end. Pure."""

from coordinator.engine_messages import Failed, Outcome
from coordinator.kv_cache.segments import SegmentStore
from coordinator.scheduling.fair_queue import Queue
from coordinator.scheduling.jobs import Job
from coordinator.scheduling.planner import Planner
from coordinator.scheduling.prompt_sharing import Sharing
from coordinator.scheduling.requests import Requests
from coordinator.scheduling.sequences import SequenceJob
from coordinator.scheduling.throughput import Speeds
from longleaf.errors import LongleafError


class JobLifecycle:
    """Jobs from admission to their end."""

    def __init__(
        self,
        segments: SegmentStore,
        requests: Requests,
        queue: Queue,
        planner: Planner,
        sharing: Sharing,
        speeds: Speeds,
    ) -> None:
        self.requests = requests
        self.queue = queue
        """Waiting jobs."""
        self.running: dict[int, Job] = {}
        self.may_begin = False
        """Whether a queued job may be able to begin, because something has changed since the last attempt."""
        self.outcomes: list[Outcome] = []
        """Outcomes to send on the streams, in order."""
        self._now = 0.0
        """The last time read from the clock."""
        self.planner = planner
        self._segments = segments
        self._sharing = sharing
        self._speeds = speeds

    def mark_changed(self) -> None:
        """A queued job may be able to begin from now on."""
        self.may_begin = True

    def mark_blocked(self) -> None:
        """No queued job can begin until something changes."""
        self.may_begin = False

    def set_time(self, now: float) -> None:
        """The clock has advanced to `now`."""
        self._now = now

    def enqueue(self, job: Job) -> None:
        """Queues an admitted job."""
        origin = job.request.origin
        for part in self._sharing.parts(job):
            self._segments.retain(origin)
            self._segments.retain(part.prefill.path, origin)
            self.requests.add(part)
            self.queue.add(part)
        self.planner.turns.add_account(job.request.scheduling.account)
        self.may_begin = True

    def preempt(self, job: SequenceJob) -> None:
        """Returns a running job to the queue."""
        self._stop(job)
        self._sharing.preempt(job)
        self.queue.add(job)

    def end_answer(self, job: SequenceJob) -> None:
        """Ends a running answer, whose tokens stay cached."""
        self._sharing.cache_answer(job)
        self.finish(job)

    def finish(self, job: Job) -> None:
        """Ends a running job and frees all that it holds."""
        self._stop(job)
        self._speeds.ended(self._now, bool(self.running or self.queue))
        self._release_path(job)

    def _stop(self, job: Job) -> None:
        """Removes a job from the running ones. Its path remains referenced."""
        del self.running[job.id]
        self._sharing.free_tail(job.stop())
        self.queue.refund_unused(job)
        self.may_begin = True
        if isinstance(job, SequenceJob):
            self.planner.forget(job.id)

    def _release_path(self, job: Job) -> None:
        origin = job.request.origin
        if job.is_deferred:
            self._segments.activate(origin)
        self._segments.release(job.prefill.path, origin)
        self._segments.release(origin)
        if origin.segments:
            self._segments.drop_orphans(origin)
        self.may_begin = True
        self.requests.remove(job)
        accounts = self.requests.accounts
        self.queue.turns.retain_only(accounts)
        self.planner.turns.retain_only(accounts)

    def drop(self, job: Job) -> None:
        """Ends a waiting or running job."""
        if job.is_running:
            self.finish(job)
        else:
            self.queue.remove(job.id)
            self._release_path(job)

    def end_early(self, job: Job) -> None:
        """Ends a waiting or running job that its client no longer needs. The tokens of an answer stay cached."""
        if job.is_running:
            self._sharing.cache_answer(job)
        self.drop(job)

    def cancel(self, request_id: int) -> bool:
        """Ends a request, whether it waits or runs. Returns False if it has ended already."""
        if (request := self.requests.get(request_id)) is None:
            return False
        for job in tuple(request.jobs):
            self.drop(job)
        return True

    def fail(self, job: Job, error: Failed | LongleafError) -> None:
        """Ends a job with an outcome for its client: Failed ends only this job, another error its whole request."""
        self.outcomes.append((job.request.id, error))
        if isinstance(error, Failed):
            self.drop(job)
        else:
            self.cancel(job.request.id)
