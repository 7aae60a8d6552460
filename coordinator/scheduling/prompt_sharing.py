"""Prompt sharing: a prompt reuses cached prompts and answers, and its samples share its segments."""

from coordinator.kv_cache.block_placer import BlockPlacer, Reservation
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.scheduling.jobs import Job, Phase
from coordinator.scheduling.limits import JobLimits
from coordinator.scheduling.prefill_cursor import GrowingSegment, PrefillCursor
from coordinator.scheduling.sequences import SequenceJob


class Sharing:
    """Reserves blocks for jobs that begin, and shares processed prompts among their samples."""

    def __init__(self, segments: SegmentStore, placer: BlockPlacer, limits: JobLimits) -> None:
        self._segments = segments
        self._placer = placer
        self._limits = limits

    def reserve(self, job: Job) -> Reservation | None:
        """The blocks of a job that begins; None when there are too few.

        A prompt reuses its cached prefix, unless that leaves too few blocks for the rest: segments are held as a whole,
        although the prompt may need only their first tokens.
        """
        if isinstance(job, SequenceJob) and job.is_sharing:
            origin, tenant = job.request.origin, job.request.scheduling.tenant
            reusable = job.prefill.token_ids[: -self._limits.least_rows]
            self._reuse(job, self._segments.match(reusable, job.rope, tenant, origin))
            if job.prefill.path.end > origin.end and (reservation := self._reserve(job)):
                return reservation
            self._reuse(job, origin)
        return self._reserve(job)

    def _reserve(self, job: Job) -> Reservation | None:
        blocks = self._limits.num_blocks(job.prefill, job.num_answer_left, job.num_tails)
        return self._placer.reserve(blocks) if self._segments.make_room(blocks) else None

    def _reuse(self, job: SequenceJob, path: TokenPath) -> None:
        self._set_path(job, path)
        num_reused = path.end - job.request.start
        job.reuse(path, num_reused + self._num_prefill(job, len(job.prefill.token_ids) - num_reused))

    def _set_path(self, job: SequenceJob, path: TokenPath) -> None:
        """Replaces the path that a job references. The new path must continue its origin."""
        origin = job.request.origin
        self._segments.retain(path, origin)
        self._segments.release(job.prefill.path, origin)

    def _num_prefill(self, job: SequenceJob, num_tokens: int) -> int:
        if job.generated:
            return self._limits.num_prefill_again(num_tokens, job.num_tails)
        return self._limits.num_prefill(num_tokens, job.num_tails, job.prompt.num_rows)

    def preempt(self, job: SequenceJob) -> None:
        """Resets a stopped job to the state before it began."""
        self._set_path(job, job.request.origin)
        self._restart(job)

    def _restart(self, job: SequenceJob) -> None:
        """Resets a job so that it recomputes its prompt and its answer so far."""
        token_ids = job.prompt_and_answer()
        prefill = PrefillCursor(job.request.origin, token_ids, self._num_prefill(job, len(token_ids)))
        job.preempt(prefill, self._limits.most_blocks(prefill, job.num_answer_left, job.num_tails))

    def parts(self, job: Job) -> list[Job]:
        """The jobs to queue for an admitted one: the job itself or, for a prompt with partial answers, each sample that
        continues, as if it had been preempted."""
        if not isinstance(job, SequenceJob) or job.prompt.generated is None:
            return [job]
        parts = [job.part(sample, generated) for sample, generated in job.prompt.generated.items()]
        for part in parts:
            self._restart(part)
        return [*parts]

    def cache_answer(self, job: Job) -> None:
        """Caches the tokens of a running answer, which ends, for the next turn of its conversation. The token that was
        sampled last is not included, because its keys do not exist yet."""
        if not isinstance(job, SequenceJob) or not job.is_sharing or job.phase is not Phase.ANSWERING:
            return
        end, tail, prefill = job.num_prompt + job.num_generated - 1, job.tail, job.prefill
        is_computed = prefill.num_computed == len(prefill.token_ids) and end > tail.segment.start
        if not is_computed or not tail.is_ready or tail.placement.loss is not None or self._placer.windows is not None:
            return  # the windows before `end` may have been freed already
        self._placer.return_unwritten(self._segments.truncate(tail.placement, end), tail.reservation)
        self._segments.cache(tail.segment, job.request.origin)

    def free_tail(self, tail: GrowingSegment) -> None:
        """Frees the segment and the blocks of a stopped job."""
        self._segments.drop(tail.segment)
        self._placer.release(tail.reservation)

    def share(self, job: SequenceJob) -> list[SequenceJob]:
        """Starts the answers of a job whose chunks are processed. Returns the jobs of the other samples. Each sample
        then has a separate segment."""
        read, reservation, rope = job.tail.segment, job.tail.reservation, job.rope
        tenant = job.request.scheduling.tenant
        if job.tail.placement.runs:
            if job.is_sharing:
                self._segments.cache(read, job.request.origin)
            else:
                self._segments.close(read)
            self._set_path(job, read.path)
            self._segments.drop(read)
            job.resume(GrowingSegment(self._segments.create(read.path, rope, tenant), reservation))
        each = self._limits.num_blocks(job.prefill, job.num_answer_left, num_tails=1)
        others = job.answer()
        for other in others:
            self._segments.retain(other.request.origin)
            self._segments.retain(other.prefill.path, other.request.origin)
            tail = self._segments.create(other.prefill.path, rope, tenant)
            other.resume(GrowingSegment(tail, reservation.split(each)))
        self._placer.release(reservation.split(reservation.left - each))
        return others
