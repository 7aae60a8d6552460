"""The fair queue: waiting jobs, and the order in which jobs take turns. Integers only."""

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from coordinator.engine_messages import SchedulingParams
from coordinator.scheduling.jobs import Job
from longleaf.types import Account

Whom = TypeVar("Whom", bound=Hashable)

AGEING = 8
"""One turn in AGEING goes to the job that has waited longest, regardless of its priority and client."""


class ServiceCounter(Generic[Whom]):
    """Tokens served, by tenant or by account.

    A new entry starts at the lowest count present. So absence earns no credit, and entries can be removed when their
    last job ends.
    """

    def __init__(self) -> None:
        self._tokens: dict[Whom, int] = {}

    def __getitem__(self, whom: Whom) -> int:
        return self._tokens[whom]

    def add(self, whom: Whom) -> None:
        """Adds an entry, unless it exists."""
        self._tokens.setdefault(whom, min(self._tokens.values(), default=0))

    def charge(self, whom: Whom, num_tokens: int) -> None:
        """Adds tokens to the count; a negative number is a refund."""
        self._tokens[whom] += num_tokens

    def retain_only(self, those: Container[Whom]) -> None:
        """Removes all other entries."""
        self._tokens = {whom: served for whom, served in self._tokens.items() if whom in those}


class FairOrder:
    """Assigns turns. The tenant with the fewest tokens served goes first; within a tenant higher priorities, and among
    equal priorities the client with the fewest tokens served. Neither a priority nor many clients give an advantage
    over another tenant.

    The account of each job must have been added with `add_account`.
    """

    def __init__(self) -> None:
        self._tenants = ServiceCounter[str]()
        self._accounts = ServiceCounter[Account]()
        self._num_turns = 0

    @property
    def is_for_the_oldest(self) -> bool:
        """The next turn goes to the oldest job."""
        return self._num_turns % AGEING == AGEING - 1

    def add_account(self, account: Account) -> None:
        """Adds a client, unless it exists."""
        self._tenants.add(account[0])
        self._accounts.add(account)

    def order(self, jobs: Iterable[Job], since: Callable[[Job], int]) -> list[Job]:
        """Jobs in the order of their turns. `since` returns a job's start of waiting: the smaller number has waited
        longer."""
        ordered = sorted(jobs, key=lambda job: (*self._rank(job.request.scheduling), since(job)))
        if ordered and self.is_for_the_oldest:
            oldest = min(ordered, key=since)
            ordered.remove(oldest)
            ordered.insert(0, oldest)
        return ordered

    def _rank(self, scheduling: SchedulingParams) -> tuple[int, int, int]:
        return self._tenants[scheduling.tenant], -scheduling.priority, self._accounts[scheduling.account]

    def record_turn(self, account: Account, num_tokens: int) -> None:
        """Counts a turn."""
        self._num_turns += 1
        self.charge(account, num_tokens)

    def charge(self, account: Account, num_tokens: int) -> None:
        """Adds tokens to the counts; a negative number is a refund."""
        self._tenants.charge(account[0], num_tokens)
        self._accounts.charge(account, num_tokens)

    def retain_only(self, accounts: Collection[Account]) -> None:
        """Removes all other clients."""
        self._accounts.retain_only(accounts)
        self._tenants.retain_only({tenant for tenant, _ in accounts})


class Queue:
    """Jobs that wait for room. When a job begins, its client is charged with all tokens that the job may take; unused
    tokens are refunded."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self.turns = FairOrder()
        """Turns of the jobs that may begin."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def add(self, job: Job) -> None:
        self._jobs[job.id] = job
        self.turns.add_account(job.request.scheduling.account)

    def remove(self, job_id: int) -> Job | None:
        return self._jobs.pop(job_id, None)

    def order(self, is_ready: Callable[[Job], bool] | None = None) -> list[Job]:
        """Jobs in the order of their turns, without those that are paused or not ready."""
        jobs = (job for job in self if not job.request.is_paused and (is_ready is None or is_ready(job)))
        return self.turns.order(jobs, lambda job: job.id)

    def pop_next(self, has_room: Callable[[Job], bool], is_ready: Callable[[Job], bool] | None = None) -> Job | None:
        """Removes and returns the next job for which there is room; None when there is none. A job that is not ready
        does not count as passed, because it does not wait for room.

        A job without room can be passed by others, which can then be preempted for it. So it begins at the latest when
        the jobs that were running when it became first have ended, as if no job had passed it.

        If contexts can be evicted, a job may have no room beside the contexts of waiting requests. When it is the
        oldest and has the turn for its age, after at most AGEING turns as the oldest, these requests are deferred. So
        it begins at the latest when the jobs that were running at that turn have ended. See `Deferral`.
        """
        passed: list[int] = []
        for job in self.order(is_ready):
            if has_room(job):
                self._begin(job, frozenset(passed))
                return job
            passed.append(job.id)
        return None

    def _begin(self, job: Job, passed: frozenset[int]) -> None:
        del self._jobs[job.id]
        account, is_for_the_oldest = job.request.scheduling.account, self.turns.is_for_the_oldest
        # A job that began for its age is spared from preemption: otherwise it might never finish.
        num_tokens = job.record_start(passed, is_spared=is_for_the_oldest and not passed)
        if passed and is_for_the_oldest:
            self.turns.charge(account, num_tokens)  # the oldest job keeps its turn
        else:
            self.turns.record_turn(account, num_tokens)

    def resume(self, job: Job) -> None:
        """Removes a job that was preempted and begins again in the same turn, without passing others."""
        del self._jobs[job.id]
        self.turns.charge(job.request.scheduling.account, job.record_start(job.passed, is_spared=job.is_spared))

    def refund_unused(self, job: Job) -> None:
        """Refunds the tokens that a stopped job did not use."""
        self.turns.charge(job.request.scheduling.account, -job.refund())
