"""Registry of the requests that have not ended, with their deadlines and pauses."""

from collections import Counter
from collections.abc import Iterator

from coordinator.expiry_heap import ExpiryHeap
from coordinator.scheduling.jobs import IngestJob, Job, Request
from longleaf.types import Account


class Requests:
    """Waiting and running requests. At most `max_unread` of them may be paused; the caller must end the surplus."""

    def __init__(self, max_unread: int) -> None:
        self.max_unread = max_unread
        self._by_id: dict[int, Request] = {}
        self._paused: dict[int, Request] = {}
        """Paused requests by id, the longest paused one first."""
        self.deadlines = ExpiryHeap[int]()
        self.expiries = ExpiryHeap[int]()
        """Expiry times of the contexts of ingests, in seconds since the Unix epoch."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def jobs(self) -> Iterator[Job]:
        return (job for request in self for job in request.jobs)

    def get(self, request_id: int) -> Request | None:
        return self._by_id.get(request_id)

    def add(self, job: Job) -> None:
        """Adds an admitted job, and its request if it is new."""
        request = job.request
        request.jobs.append(job)
        self._by_id[request.id] = request
        self.deadlines.add(request.id, request.scheduling.end)
        if isinstance(job, IngestJob):
            self.expiries.add(request.id, job.document.settings.ingest_expiry)

    def remove(self, job: Job) -> None:
        """Removes a job that has ended, and also its request if this was the last job."""
        request = job.request
        request.jobs.remove(job)
        if not request.jobs:
            del self._by_id[request.id]
            self.deadlines.discard(request.id)
            self.expiries.discard(request.id)
            self._paused.pop(request.id, None)

    def ingests_into(self, context_id: str) -> list[int]:
        """Ids of the requests that ingest into a context."""
        ingests = (job for job in self.jobs() if isinstance(job, IngestJob))
        return [job.request.id for job in ingests if job.document.context == context_id]

    @property
    def contexts(self) -> set[str | None]:
        """Ids of the contexts that are queried or ingested into, except by deferred jobs."""
        return {job.context for job in self.jobs() if not job.is_deferred}

    @property
    def accounts(self) -> set[Account]:
        return {request.scheduling.account for request in self}

    def in_line(self) -> Counter[str]:
        """Number of requests that wait for room, by tenant."""
        waiting = (request for request in self if not request.is_paused and not request.is_running)
        return Counter(request.scheduling.tenant for request in waiting)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    def pause(self, request: Request, is_paused: bool) -> None:
        """Sets whether a request is paused. Repeated pauses keep the time of the first."""
        request.is_paused = is_paused
        if is_paused:
            self._paused.setdefault(request.id, request)
        else:
            self._paused.pop(request.id, None)

    @property
    def longest_paused(self) -> Request | None:
        """The request that has been paused longest."""
        return next(iter(self._paused.values()), None)

    @property
    def surplus(self) -> Request | None:
        """If too many requests are paused: the longest paused request of the client with the most paused requests."""
        if self.num_paused <= self.max_unread:
            return None
        [(greedy, _)] = Counter(request.scheduling.account for request in self._paused.values()).most_common(1)
        return next(request for request in self._paused.values() if request.scheduling.account == greedy)

    def audit(self) -> None:
        assert all(request.jobs for request in self)
        assert self._paused == {request.id: request for request in self if request.is_paused}
        assert set(self.deadlines) == {request.id for request in self if request.scheduling.end is not None}
        assert set(self.expiries) <= {job.request.id for job in self.jobs() if isinstance(job, IngestJob)}
