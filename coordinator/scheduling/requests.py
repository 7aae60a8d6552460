"""The requests that have not ended: by id, by deadline, and those whose readers are behind."""

from collections import Counter
from collections.abc import Iterator

from coordinator.expiry_heap import ExpiryHeap
from coordinator.scheduling.jobs import IngestJob, Job, Request
from longleaf.types import Account


class Requests:
    """Requests that wait or run. More than `max_unread` of them may not be paused for long."""

    def __init__(self, max_unread: int) -> None:
        self.max_unread = max_unread
        self._by_id: dict[int, Request] = {}
        self._paused: dict[int, Request] = {}
        """The one that has been paused longest is first."""
        self.deadlines = ExpiryHeap[int]()
        self.expiries = ExpiryHeap[int]()
        """When the contexts of ingests expire, since the epoch."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def jobs(self) -> Iterator[Job]:
        return (job for request in self for job in request.jobs)

    def get(self, request_id: int) -> Request | None:
        return self._by_id.get(request_id)

    def add(self, job: Job) -> None:
        """Takes in the request of a job that is admitted."""
        request = job.request
        request.jobs.append(job)
        self._by_id[request.id] = request
        self.deadlines.add(request.id, request.claim.end)
        if isinstance(job, IngestJob):
            self.expiries.add(request.id, job.document.settings.ingest_expiry)

    def remove(self, job: Job) -> None:
        """A job has ended, and with the last one its request."""
        request = job.request
        request.jobs.remove(job)
        if not request.jobs:
            del self._by_id[request.id]
            self.deadlines.discard(request.id)
            self.expiries.discard(request.id)
            self._paused.pop(request.id, None)

    def ingests_into(self, context_id: str) -> list[int]:
        """Ids of those that read a document into a context."""
        ingests = (job for job in self.jobs() if isinstance(job, IngestJob))
        return [job.request.id for job in ingests if job.document.context == context_id]

    @property
    def contexts(self) -> set[str | None]:
        """Ids of those that are asked, or read into."""
        return {job.context for job in self.jobs()}

    @property
    def accounts(self) -> set[Account]:
        return {request.claim.account for request in self}

    def in_line(self) -> Counter[str]:
        """How many wait for room, by tenant."""
        waiting = (request for request in self if not request.is_paused and not request.is_running)
        return Counter(request.claim.tenant for request in waiting)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    def pause(self, request: Request, is_paused: bool) -> None:
        """Notes whether a request's reader is behind; one that was already has been so since then."""
        request.is_paused = is_paused
        if is_paused:
            self._paused.setdefault(request.id, request)
        else:
            self._paused.pop(request.id, None)

    @property
    def longest_paused(self) -> Request | None:
        """The one whose reader has been behind longest."""
        return next(iter(self._paused.values()), None)

    @property
    def surplus(self) -> Request | None:
        """When too many are paused: of the client that has most, the one that has been so longest."""
        if self.num_paused <= self.max_unread:
            return None
        [(greedy, _)] = Counter(request.claim.account for request in self._paused.values()).most_common(1)
        return next(request for request in self._paused.values() if request.claim.account == greedy)

    def audit(self) -> None:
        assert all(request.jobs for request in self)
        assert self._paused == {request.id: request for request in self if request.is_paused}
        assert set(self.deadlines) == {request.id for request in self if request.claim.end is not None}
        assert set(self.expiries) <= {job.request.id for job in self.jobs() if isinstance(job, IngestJob)}
