"""Jobs that may break epochs. Pure."""

from collections.abc import Container, Iterable
from collections.abc import Sequence as Several

from coordinator.scheduling.jobs import Job
from coordinator.scheduling.sequences import Sequence
from longleaf.channel.step import Decode, Work

MAX_BROKEN = 2
"""Epochs that a job may break; with the last of them it fails."""


class Suspects:
    """Jobs in whose steps epochs broke. The rows of each are a step of their own until one of them is answered: what
    breaks then is not the others' fault."""

    def __init__(self) -> None:
        self._num_broken: dict[Job, int] = {}

    def __len__(self) -> int:
        return len(self._num_broken)

    def accuse(self, jobs: Iterable[Job]) -> list[Job]:
        """A step of these broke an epoch. Gives those in whose steps it was the second one."""
        guilty = list[Job]()
        for job in jobs:
            self._num_broken[job] = self._num_broken.get(job, 0) + 1
            if self._num_broken[job] >= MAX_BROKEN:
                guilty.append(job)
                del self._num_broken[job]
        return guilty

    def clear(self, jobs: Iterable[Job], work: Work) -> None:
        """A step of these was answered; a chunk before an answer proves nothing of that."""
        for job in jobs:
            if isinstance(work, Decode) or not isinstance(job, Sequence):
                self._num_broken.pop(job, None)

    def keep(self, jobs: Container[Job]) -> None:
        """Forgets all but these."""
        self._num_broken = {job: count for job, count in self._num_broken.items() if job in jobs}

    def part(self, jobs: Several[Sequence]) -> Several[Sequence]:
        """Those of some jobs that may have rows in one step: one suspect, or all others."""
        suspects = [job for job in jobs if job in self._num_broken]
        others = [job for job in jobs if job not in self._num_broken]
        return suspects[:1] or others
