"""Fault scores: how strongly the work of a step is suspected of having ended an epoch. Pure."""

from collections.abc import Container, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from coordinator.scheduling.jobs import Job
from coordinator.scheduling.sequences import Sequence
from longleaf.rank_protocol.step import Decode, Prefill, Work

LOSS_SCORE = 1
"""Score for a process that exited: the cause is more often its machine than the work."""
BREAK_SCORE = 2
"""Score for ranks that raised errors or hung together. Work with this score runs with nothing else under way."""
DROP_SCORE = 4
"""Score at which work is dropped: its epochs broke twice, or lost ranks four times, without progress
past the position where they ended."""


def raise_score(before: int, amount: int, *, is_certain: bool) -> int:
    """The new score. If other work was under way as well, the score does not exceed the level at which both run
    separately."""
    return before + amount if is_certain else max(before, min(before + amount, BREAK_SCORE))


@dataclass(slots=True)
class _Suspicion:
    """The fault score of a job, and the position past which it is cleared."""

    amount: int = 0
    end: int = 0
    """End of the chunks in which epochs ended."""
    is_answer: bool = False
    """Whether an epoch ended in a decode step of the job."""

    def add(self, work: Work, amount: int, *, is_certain: bool) -> None:
        self.amount = raise_score(self.amount, amount, is_certain=is_certain)
        self.end = max(self.end, _end(work))
        self.is_answer |= isinstance(work, Decode)

    def is_passed_by(self, work: Work) -> bool:
        """Whether the completion of `work` clears the job. A chunk does not clear a job that broke an epoch in a decode
        step."""
        return isinstance(work, Decode) or (not self.is_answer and _end(work) >= self.end)


class SuspectedJobs:
    """Jobs in whose steps epochs ended. A suspected job has separate steps, and no other step is in flight, until one
    of them is answered. A further failure then cannot be due to another job."""

    def __init__(self) -> None:
        self._found: dict[Job, _Suspicion] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add_suspicion(self, jobs: Iterable[Job], work: Work, amount: int, *, is_certain: bool) -> list[Job]:
        """Adds `amount` to the fault scores of jobs whose work ended an epoch, or may have unless `is_certain`. Removes
        and returns the jobs that have reached the DROP_SCORE."""
        guilty = list[Job]()
        for job in jobs:
            found = self._found.setdefault(job, _Suspicion())
            found.add(work, amount, is_certain=is_certain)
            if found.amount >= DROP_SCORE:
                guilty.append(job)
                del self._found[job]
        return guilty

    def clear(self, jobs: Iterable[Job], work: Work) -> None:
        """Clears jobs whose suspected work was answered."""
        for job in jobs:
            if (found := self._found.get(job)) is not None and found.is_passed_by(work):
                del self._found[job]

    def retain_only(self, jobs: Container[Job]) -> None:
        """Removes all other jobs."""
        self._found = {job: found for job, found in self._found.items() if job in jobs}

    def schedulable(self, jobs: Several[Sequence]) -> Several[Sequence]:
        """The jobs that may have rows in the same step: one suspected job, or all of them if none is suspected."""
        apart = [job for job in jobs if self.runs_alone(job)]
        return apart[:1] or jobs

    def runs_alone(self, job: Job) -> bool:
        """Whether the job must have separate steps, while no other step is in flight."""
        return job in self._found and self._found[job].amount >= BREAK_SCORE


def _end(work: Work) -> int:
    """The position after the last token of a chunk; 0 for a decode step."""
    return work.start + len(work.token_ids) if isinstance(work, Prefill) else 0
