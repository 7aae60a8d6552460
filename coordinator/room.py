"""Whether there is room for a job: some day, now, or if others give way."""

from collections.abc import Iterable

from coordinator.blocks import Placer
from coordinator.contexts import Contexts, Segment
from coordinator.jobs import Ingest, Job, Sequence
from coordinator.speeds import Speeds
from longleaf.config import EngineConfig
from longleaf.errors import ResourceExhausted


class Room:
    """Blocks of all ranks, and places among the sequences that run."""

    def __init__(self, config: EngineConfig, placer: Placer, contexts: Contexts, speeds: Speeds) -> None:
        self._config = config
        self._placer = placer
        self._contexts = contexts
        self._speeds = speeds

    def check(self, job: Job, jobs: Iterable[Job]) -> None:
        """Raises ResourceExhausted unless the job, and every other of `jobs`, can begin once nothing else runs.

        Whoever is behind in the queue may come to be in front, so it does not matter who was there first.
        """
        jobs = list(jobs)
        kept: dict[int, Segment] = {s.id: s for context in self._contexts.list() for s in context.path}
        leaving = {s.id: s for other in jobs for s in other.path if s.id not in kept}
        coming = sum(other.num_blocks for other in jobs if isinstance(other, Ingest))
        num_kept = _num_blocks(kept) + coming
        if num_kept + job.num_blocks > self._placer.num_blocks:
            raise self._no_room(job, num_kept)
        answers = [other.num_blocks for other in jobs if isinstance(other, Sequence) and isinstance(job, Ingest)]
        if num_kept + job.num_blocks + _num_blocks(leaving) + max(answers, default=0) > self._placer.num_blocks:
            raise self._no_room(job, num_kept + _num_blocks(leaving), self._speeds.retry_seconds(len(jobs)))

    def _no_room(self, job: Job, num_held: int, retry_seconds: float | None = None) -> ResourceExhausted:
        size = self._placer.block_size
        needed, total, held = job.num_blocks * size, self._placer.num_blocks * size, num_held * size
        text = f"{needed} tokens are needed, and of {total} the contexts keep {held}; delete a context"
        if retry_seconds is not None:
            text = f"{needed} tokens are needed, and of {total} contexts and generations under way need too many"
        return ResourceExhausted("pool", text, retry_seconds)

    def victims(self, job: Job, running: Iterable[Job]) -> list[Sequence] | None:
        """Sequences that must give way so that the job can begin: none when there is room, None when it is no use.

        Whoever does not read gives way to everybody; else only to a higher priority, the lowest and youngest first.
        """
        sequences = [other for other in running if isinstance(other, Sequence)]
        blocks = job.num_blocks - self._placer.num_free
        places = len(sequences) + 1 - self._config.max_sequences if isinstance(job, Sequence) else 0
        chosen: list[Sequence] = []
        for other in sorted(filter(job.may_preempt, sequences), key=lambda other: other.rank_as_victim):
            if blocks <= 0 and places <= 0:
                break
            chosen.append(other)
            blocks -= other.num_blocks
            places -= 1
        return chosen if blocks <= 0 and places <= 0 else None


def _num_blocks(segments: dict[int, Segment]) -> int:
    return sum(segment.num_blocks for segment in segments.values())
