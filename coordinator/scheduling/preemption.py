"""Whether there is room for a job: some day, now, or if others give way."""

from collections import Counter
from collections.abc import Iterable

from coordinator.placement.blocks import Blocks, Placer
from coordinator.placement.contexts import Contexts
from coordinator.placement.holdings import Holdings, count_all
from coordinator.placement.paths import Segment
from coordinator.placement.segments import Segments
from coordinator.scheduling.jobs import Ingest, Job, Sequence
from coordinator.scheduling.speeds import Speeds
from longleaf.config import EngineConfig
from longleaf.errors import ResourceExhausted


class Crowd:
    """The jobs that run, as those that wait must know them: found once for all of these, who may be many."""

    def __init__(self, running: Iterable[Job]) -> None:
        running = list(running)
        self.sequences = [other for other in running if isinstance(other, Sequence)]
        self.num_tails = sum(other.num_tails for other in running)
        self._is_any_paused = any(other.is_paused for other in self.sequences)
        self._passed = frozenset[int]().union(*(other.passed for other in self.sequences))
        priorities = (other.claim.priority for other in self.sequences if not other.is_spared)
        self._least_priority = min(priorities, default=None)

    def may_yield_to(self, job: Job) -> bool:
        """Whether the job may preempt any of them."""
        if self._is_any_paused or job.id in self._passed:
            return True
        return self._least_priority is not None and self._least_priority < job.claim.priority


class Room:
    """Blocks of all ranks, and places among the sequences that run."""

    def __init__(
        self, config: EngineConfig, placer: Placer, contexts: Contexts, segments: Segments, speeds: Speeds
    ) -> None:
        self._config = config
        self._placer = placer
        self._contexts = contexts
        self._segments = segments
        self._speeds = speeds

    def check(self, job: Job, jobs: Iterable[Job]) -> None:
        """Raises ResourceExhausted unless the job, and every other of `jobs`, can begin once nothing else runs.

        Whoever is behind in the queue may come to be in front, so it does not matter who was there first.
        """
        jobs = list(jobs)
        kept: dict[int, Segment] = {s.id: s for context in self._contexts.list() for s in context.path.segments}
        answers = [other for other in jobs if isinstance(other, Sequence)]
        leaving = {s.id: s for other in answers for s in other.origin.segments if s.id not in kept}
        coming = sum((other.num_blocks for other in jobs if isinstance(other, Ingest)), Blocks())
        holdings = self._segments.holdings
        held = count_all(holdings.of(kept.values())) + coming
        self._check_room(job, held, None)
        held += count_all(holdings.of(leaving.values()))
        if isinstance(job, Ingest):
            needs = [other.num_blocks for other in answers]
            held += Blocks(max((n.sharded for n in needs), default=0), max((n.windows for n in needs), default=0))
        self._check_room(job, held, self._speeds.retry_seconds(len(jobs)))

    def _check_room(self, job: Job, held: Blocks, retry_seconds: float | None) -> None:
        """Raises ResourceExhausted unless the job fits beside what is held; without a time it never will."""
        size, total = self._placer.block_size, self._placer.num_blocks
        pools = {
            "pool": (job.num_blocks.sharded, total.sharded, held.sharded),
            "window pool": (job.num_blocks.windows, total.windows, held.windows),
        }
        for pool, counts in pools.items():
            needed, room, taken = (count * size for count in counts)
            if needed + taken <= room:
                continue
            more = ", or serve with more --window-bytes" if pool == "window pool" else ""
            text = f"{needed:,} tokens are needed, and of {room:,} the contexts keep {taken:,}; delete a context{more}"
            if retry_seconds is not None:
                text = f"{needed:,} tokens are needed, and of {room:,} contexts and generations under way need too many"
            raise ResourceExhausted(pool, text, retry_seconds)

    def has_places(self, job: Job, crowd: Crowd) -> bool:
        """Whether so many answers may run at once."""
        return self._num_places_lacking(job, crowd) <= 0

    def _num_places_lacking(self, job: Job, crowd: Crowd) -> int:
        return crowd.num_tails + job.num_tails - self._config.max_sequences if job.num_tails else 0

    def victims(self, job: Job, crowd: Crowd) -> list[Sequence] | None:
        """Sequences that must give way so that a job that has no room can begin, None when it is no use.

        Whoever does not read gives way to everybody, and whoever passed the job gives way to it; else only to a higher
        priority. The lowest and youngest are first.
        """
        if not crowd.may_yield_to(job):
            return None  # the usual case, and many jobs may wait
        candidates = [other for other in crowd.sequences if job.may_preempt(other)]
        places = self._num_places_lacking(job, crowd)
        lacking = job.num_blocks - self._placer.num_free - self._segments.num_reclaimable
        chosen: list[Sequence] = []
        dropped: Counter[int] = Counter()
        for other in sorted(candidates, key=lambda other: other.rank_as_victim):
            if lacking.fits(Blocks()) and places <= 0:
                break
            chosen.append(other)
            places -= other.num_tails
            lacking -= _num_freed(other, dropped, self._segments.holdings)
        return chosen if lacking.fits(Blocks()) and places <= 0 else None


def _num_freed(job: Sequence, dropped: Counter[int], holdings: Holdings) -> Blocks:
    """Blocks that are free, or as good as free, when a running job is preempted after those that `dropped` counts."""
    assert job.holding is not None
    assert job.reservation is not None
    num_blocks = job.holding.num_blocks + job.reservation.left
    for holding in holdings.of(job.path.segments[len(job.origin.segments) :]):
        dropped[holding.segment.id] += 1
        if holding.num_references - holding.num_kept == dropped[holding.segment.id]:
            num_blocks += holding.num_blocks
    return num_blocks
