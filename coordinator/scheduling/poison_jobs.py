"""Jobs that may break epochs. Pure."""

from collections.abc import Container, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from coordinator.recovery.fault_score import BREAK, GUILTY, add
from coordinator.scheduling.jobs import Job
from coordinator.scheduling.sequences import Sequence
from longleaf.rank_protocol.step import Decode, Prefill, Work


@dataclass(slots=True)
class _Suspicion:
    """How much of it there is, and where a job must come to be cleared."""

    amount: int = 0
    end: int = 0
    """Of the chunks in which epochs ended."""
    is_answer: bool = False
    """One ended while the job answered."""

    def add(self, work: Work, amount: int, *, is_certain: bool) -> None:
        self.amount = add(self.amount, amount, is_certain=is_certain)
        self.end = max(self.end, _end(work))
        self.is_answer |= isinstance(work, Decode)

    def is_passed_by(self, work: Work) -> bool:
        """A chunk before an answer proves nothing of that."""
        return isinstance(work, Decode) or (not self.is_answer and _end(work) >= self.end)


class PoisonJobs:
    """Jobs in whose steps epochs ended. Those that are suspected of breaking them have steps of their own, with nothing
    else under way, until one of these is answered: what breaks then is not the others' fault."""

    def __init__(self) -> None:
        self._found: dict[Job, _Suspicion] = {}

    def __len__(self) -> int:
        return len(self._found)

    def accuse(self, jobs: Iterable[Job], work: Work, amount: int, *, is_certain: bool) -> list[Job]:
        """This work of theirs ended an epoch, or unless that `is_certain`, other work. Gives those that are guilty by
        now."""
        guilty = list[Job]()
        for job in jobs:
            found = self._found.setdefault(job, _Suspicion())
            found.add(work, amount, is_certain=is_certain)
            if found.amount >= GUILTY:
                guilty.append(job)
                del self._found[job]
        return guilty

    def clear(self, jobs: Iterable[Job], work: Work) -> None:
        """This work of theirs was answered."""
        for job in jobs:
            if (found := self._found.get(job)) is not None and found.is_passed_by(work):
                del self._found[job]

    def keep(self, jobs: Container[Job]) -> None:
        """Forgets all but these."""
        self._found = {job: found for job, found in self._found.items() if job in jobs}

    def part(self, jobs: Several[Sequence]) -> Several[Sequence]:
        """Those of some jobs that may have rows in one step: one that broke an epoch, or all others."""
        apart = [job for job in jobs if self.is_apart(job)]
        return apart[:1] or jobs

    def is_apart(self, job: Job) -> bool:
        """Its steps are its own, and nothing else is under way meanwhile."""
        return job in self._found and self._found[job].amount >= BREAK


def _end(work: Work) -> int:
    """The position after the last token of a chunk."""
    return work.start + len(work.token_ids) if isinstance(work, Prefill) else 0
