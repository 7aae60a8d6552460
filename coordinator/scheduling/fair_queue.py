"""Who is next: the jobs that wait, and the order in which jobs take turns. Integers only."""

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from coordinator.engine_messages import SchedulingClaim
from coordinator.scheduling.jobs import Job
from longleaf.types import Account

Whom = TypeVar("Whom", bound=Hashable)

AGEING = 8
"""One of so many turns goes to whoever waits longest, whatever its priority and its client."""


class ServiceCounter(Generic[Whom]):
    """Tokens that each has been served.

    Whoever comes counts as served as few as the least served one that is there, so that absence saves nothing up and
    nobody must be remembered after leaving.
    """

    def __init__(self) -> None:
        self._tokens: dict[Whom, int] = {}

    def __getitem__(self, whom: Whom) -> int:
        return self._tokens[whom]

    def enter(self, whom: Whom) -> None:
        """Somebody has come, or is there already."""
        self._tokens.setdefault(whom, min(self._tokens.values(), default=0))

    def charge(self, whom: Whom, num_tokens: int) -> None:
        """Counts tokens; fewer than 0 give back."""
        self._tokens[whom] += num_tokens

    def keep(self, those: Container[Whom]) -> None:
        """Forgets all but those."""
        self._tokens = {whom: served for whom, served in self._tokens.items() if whom in those}


class FairOrder:
    """Deals turns. The tenant that was served the fewest tokens goes first; within it higher priorities, and among
    equal ones the client that was served the fewest. Nobody gets ahead of another tenant by a priority or many clients.

    Every account of a job must have come.
    """

    def __init__(self) -> None:
        self._tenants = ServiceCounter[str]()
        self._accounts = ServiceCounter[Account]()
        self._num_turns = 0

    @property
    def is_for_the_oldest(self) -> bool:
        """The next turn goes by age."""
        return self._num_turns % AGEING == AGEING - 1

    def enter(self, account: Account) -> None:
        """A client has come, or is there already."""
        self._tenants.enter(account[0])
        self._accounts.enter(account)

    def order(self, jobs: Iterable[Job], since: Callable[[Job], int]) -> list[Job]:
        """Jobs as they are next; `since` tells which of them waits longer: the smaller number."""
        ordered = sorted(jobs, key=lambda job: (*self._rank(job.request.claim), since(job)))
        if ordered and self.is_for_the_oldest:
            oldest = min(ordered, key=since)
            ordered.remove(oldest)
            ordered.insert(0, oldest)
        return ordered

    def _rank(self, claim: SchedulingClaim) -> tuple[int, int, int]:
        return self._tenants[claim.tenant], -claim.priority, self._accounts[claim.account]

    def take(self, account: Account, num_tokens: int) -> None:
        """Counts a turn."""
        self._num_turns += 1
        self.charge(account, num_tokens)

    def charge(self, account: Account, num_tokens: int) -> None:
        """Counts tokens; fewer than 0 give back."""
        self._tenants.charge(account[0], num_tokens)
        self._accounts.charge(account, num_tokens)

    def keep(self, accounts: Collection[Account]) -> None:
        """Forgets all clients but these."""
        self._accounts.keep(accounts)
        self._tenants.keep({tenant for tenant, _ in accounts})


class Queue:
    """Jobs that wait for room. A client is charged with all tokens that a job may take when it begins, and gets back
    what was not used."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self.turns = FairOrder()
        """Turns of those that may begin."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def add(self, job: Job) -> None:
        self._jobs[job.id] = job
        self.turns.enter(job.request.claim.account)

    def remove(self, job_id: int) -> Job | None:
        return self._jobs.pop(job_id, None)

    def order(self, is_ready: Callable[[Job], bool] | None = None) -> list[Job]:
        """As they are next. Whoever would not read its answer does not begin, nor who is not ready."""
        jobs = (job for job in self if not job.request.is_paused and (is_ready is None or is_ready(job)))
        return self.turns.order(jobs, lambda job: job.id)

    def take(self, has_room: Callable[[Job], bool], is_ready: Callable[[Job], bool] | None = None) -> Job | None:
        """The next job for which there is room, taken out; None when there is none. Those that are not ready are not
        passed by others: it is not for room that they wait.

        Jobs without room let others pass. Those give way to them later, so that a job begins at the latest when what
        ran when it became the next one has ended: as if nobody had passed it.
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
        account, is_for_the_oldest = job.request.claim.account, self.turns.is_for_the_oldest
        # Whoever is spared begins for its age: else it might never get to its end.
        num_tokens = job.take_turn(passed, is_spared=is_for_the_oldest and not passed)
        if passed and is_for_the_oldest:
            self.turns.charge(account, num_tokens)  # the oldest keeps its turn
        else:
            self.turns.take(account, num_tokens)

    def go_on(self, job: Job) -> None:
        """Takes out a job that was running until now and begins anew in the same turn, passing nobody."""
        del self._jobs[job.id]
        self.turns.charge(job.request.claim.account, job.take_turn(job.passed, is_spared=job.is_spared))

    def settle(self, job: Job) -> None:
        """Gives back what a job that was running did not use."""
        self.turns.charge(job.request.claim.account, -job.refund())
