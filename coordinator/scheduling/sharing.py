"""What prompts share: what is held of one is not read again, and its samples read it once."""

from coordinator.placement.blocks import Placer, Reservation
from coordinator.placement.paths import NOWHERE, Path
from coordinator.placement.segments import Segments
from coordinator.scheduling.jobs import Job, Sequence
from coordinator.scheduling.limits import Limits


class Prompts:
    """Reserves blocks for jobs that begin, and hands what they have read to their samples."""

    def __init__(self, segments: Segments, placer: Placer, limits: Limits) -> None:
        self._segments = segments
        self._placer = placer
        self._limits = limits

    def reserve(self, job: Job) -> Reservation | None:
        """The blocks of a job that begins; None when there are too few.

        A plain prompt reuses what is held of it, unless that leaves too little room for the rest: segments are held
        whole, though a beginning may be all that the prompt needs.
        """
        if isinstance(job, Sequence) and job.is_sharing:
            self._reuse(job, self._segments.match(job.token_ids[:-1], job.rope))
            if job.path.end and (reservation := self._reserve(job)):
                return reservation
            self._reuse(job, NOWHERE)
        return self._reserve(job)

    def _reserve(self, job: Job) -> Reservation | None:
        blocks = self._limits.num_blocks(job, job.num_answer_left, job.num_tails)
        return self._placer.reserve(blocks) if self._segments.make_room(blocks) else None

    def _reuse(self, job: Sequence, path: Path) -> None:
        self._move(job, path)
        job.reuse(path, path.end + self._num_prefill(job, path.end))

    def _move(self, job: Sequence, path: Path) -> None:
        """Has a job refer to another path that goes on from where it began."""
        self._segments.retain(path, job.origin)
        self._segments.release(job.path, job.origin)
        job.path = path

    def _num_prefill(self, job: Sequence, num_held: int) -> int:
        count = self._limits.num_prefill_again if job.generated else self._limits.num_prefill
        return count(len(job.token_ids) - num_held, job.num_tails)

    def preempt(self, job: Sequence) -> None:
        """Makes a job that has been stopped one that has not begun."""
        self._move(job, job.origin)
        job.preempt()
        job.num_prefill = self._num_prefill(job, 0)
        job.num_blocks = self._limits.most_blocks(job, job.num_answer_left, job.num_tails)

    def share(self, job: Sequence) -> list[Sequence]:
        """The samples of a job whose chunks are read, itself first. From here on each has a segment of its own."""
        assert job.holding is not None
        assert job.reservation is not None
        if job.holding.runs:
            read = job.holding.segment
            if job.is_sharing:
                self._segments.keep(read)
            else:
                self._segments.close(read)
            self._move(job, read.path)
            self._segments.drop(read)
            job.answer(self._segments.create(job.path, job.rope))
        each = self._limits.num_blocks(job, job.num_answer_left, num_tails=1)
        others = job.fan_out(each)
        self._placer.release(job.reservation.split(job.reservation.left - each))
        for other in others:
            assert other.reservation is not None
            self._segments.retain(other.origin)
            self._segments.retain(other.path, other.origin)
            other.begin(self._segments.create(other.path, job.rope), other.reservation)
        return [job, *others]
