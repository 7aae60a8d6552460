"""What the next step does. Pure: no clock, no I/O; the engine owns both.

A job is admitted to a queue, begins when its blocks can be reserved (strictly first come, first served), and then can
never run out of room. Steps alternate between one chunk of one job and one token of every sequence that is ready.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds

import msgspec

from coordinator.blocks import Placer
from coordinator.contexts import Context, Contexts
from coordinator.events import Ended, EndReason, Event, Progress, Prompt, Started, Tokens
from coordinator.jobs import Ingest, Job, Sequence
from coordinator.limits import Limits
from coordinator.paths import Path, Segment
from coordinator.prompts import Prompts
from coordinator.segments import Segments
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, InvalidArgument, LongleafError, ResourceExhausted
from longleaf.messages import UNCHANGED, ContextSettings
from longleaf.sampling import Logprobs
from longleaf.step import Decode, Prefill, StepPlan, StepResult

RETRY_SECONDS = 2.0


class Acknowledged(msgspec.Struct, frozen=True):
    """The document of an ingest is part of its context."""

    context: str


Outcome = tuple[int, Event | Acknowledged | LongleafError]
"""Job id, and what its stream gets. An error, Ended and Acknowledged are the last one of a job."""


class Scheduler:
    """Jobs, their segments and their blocks. One plan may be under way at a time: schedule, then commit."""

    def __init__(self, config: EngineConfig, placer: Placer, max_positions: int, epoch: int) -> None:
        self._config = config
        self._placer = placer
        self._limits = Limits(config, placer, max_positions)
        self._epoch = epoch
        self.segments = Segments(placer)
        self.contexts = Contexts(self.segments)
        self._prompts = Prompts(self.segments, placer, self._limits)
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._prefilling: deque[Job] = deque()
        self._decoding: dict[int, Sequence] = {}
        self._forgotten: list[int] = []
        self._outcomes: list[Outcome] = []
        self._under_way: tuple[Job, ...] = ()
        self._step = 0
        self._was_prefill = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Jobs, however many samples each of them has."""
        return len({job.owner for job in self._running.values()})

    # --- admit ---

    def admit(self, job_id: int, prompt: Prompt) -> None:
        """Queues a generation. Its sample number i runs under the id job_id + i.

        Raises InvalidArgument, NotFound or ResourceExhausted, and then keeps nothing.
        """
        prompt.sampling.check()
        if not 1 <= prompt.num_samples <= self._config.max_sequences:
            limit = f"between 1 and {self._config.max_sequences}, the generations that run at once"
            raise InvalidArgument("sample_count", f"{prompt.num_samples} is not {limit}")
        path = self.contexts.get(prompt.context).path if prompt.context is not None else Path()
        if not prompt.token_ids:
            raise InvalidArgument("input", "has no tokens")
        job = Sequence(job_id, path, prompt, self._limits.num_prefill(len(prompt.token_ids), prompt.num_samples))
        max_tokens = prompt.sampling.max_tokens
        self._limits.check(job, "input", 1)
        self._limits.check(job, "sampling.max_token_count", max_tokens)
        job.num_blocks = self._limits.check(job, "sample_count", max_tokens, prompt.num_samples)
        self._enqueue(job)

    def admit_ingest(
        self,
        job_id: int,
        context: str,
        token_ids: TokenIds[int],
        *,
        append: bool,
        settings: ContextSettings = UNCHANGED,
    ) -> None:
        """Queues a document. Raises AlreadyExists, NotFound, InvalidArgument or ResourceExhausted."""
        is_busy = self._is_read_into(context)
        if not append and (is_busy or context in self.contexts):
            raise AlreadyExists(f"contexts/{context}")
        path = self.contexts.get(context).path if append else Path()
        if not token_ids:
            raise InvalidArgument("text", "has no tokens")
        if is_busy:
            raise ResourceExhausted(f"contexts/{context}", "another document is being appended", RETRY_SECONDS)
        job = Ingest(job_id, path, token_ids, context, settings)
        job.num_blocks = self._limits.check(job, "text", 0)
        self._enqueue(job)

    def _is_read_into(self, context: str) -> bool:
        return any(job.context == context for job in self._jobs() if isinstance(job, Ingest))

    def _enqueue(self, job: Job) -> None:
        if self.num_waiting >= self._config.max_waiting:
            raise ResourceExhausted("queue", f"{self.num_waiting} requests wait already", RETRY_SECONDS)
        if self._pinned_blocks() + job.num_blocks > self._placer.num_blocks:
            raise self._no_room(job)
        self.segments.retain(job.path.segments)
        self._waiting.append(job)

    def _pinned_blocks(self) -> int:
        """Blocks that waiting does not free: contexts, and documents that will become part of them."""
        kept: dict[int, Segment] = {s.id: s for context in self.contexts.list() for s in context.path.segments}
        coming = sum(job.num_blocks for job in self._jobs() if isinstance(job, Ingest))
        return sum(segment.num_blocks for segment in kept.values()) + coming

    def _no_room(self, job: Job) -> ResourceExhausted:
        size = self._placer.block_size
        needed, total = job.num_blocks * size, self._placer.num_blocks * size
        held = self._pinned_blocks() * size
        text = f"{needed} tokens are needed, and of {total} the contexts keep {held}; delete a context"
        return ResourceExhausted("pool", text)

    def _jobs(self) -> Iterable[Job]:
        yield from self._waiting
        yield from self._running.values()

    # --- schedule ---

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing is ready. Outcomes may appear as well: see `drain`."""
        assert not self._under_way, "a step is under way"
        self._begin_waiting()
        if not self._prefilling and not self._decoding:
            return None
        self._was_prefill = bool(self._prefilling) and not (self._was_prefill and self._decoding)
        work = self._plan_prefill() if self._was_prefill else self._plan_decode()
        self._step += 1
        forgotten, self._forgotten = tuple(self._forgotten), []
        return StepPlan(self._epoch, self._step, work, self.segments.take_forgotten(), forgotten)

    def _begin_waiting(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            num_sequences = sum(other.num_tails for other in self._running.values())
            if job.num_tails and num_sequences + job.num_tails > self._config.max_sequences:
                return
            reservation = self._prompts.reserve(job)
            if reservation is None:
                # Whatever the contexts kept when it was queued, the job fitted beside them, and what came later is
                # behind it: so only what runs can be in its way. What is kept of earlier prompts never is.
                assert self._running, "a queued job can never begin"
                return
            self._waiting.popleft()
            job.begin(self.segments.create(job.path), reservation)
            self._start(job)

    def _start(self, job: Job) -> None:
        self._running[job.id] = job
        if isinstance(job, Sequence):
            self._outcomes.append((job.id, Started(job.num_prompt, job.num_cached)))
        self._sort_in(job)

    def _sort_in(self, job: Job) -> None:
        if job.is_prefilling:
            self._prefilling.append(job)
        elif isinstance(job, Sequence):
            for sample in self._prompts.share(job):
                self._running[sample.id] = self._decoding[sample.id] = sample

    def _plan_prefill(self) -> Prefill:
        job = self._prefilling.popleft()
        self._under_way = (job,)
        return job.next_chunk(self._placer, self._config.chunk_size)

    def _plan_decode(self) -> Decode:
        ready = tuple(self._decoding.values())[: self._config.max_sequences]
        self._under_way = ready
        return Decode(tuple(job.next_row(self._placer) for job in ready))

    # --- commit ---

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[Outcome]:
        """Takes in what the ranks did. `now` in seconds since the epoch dates contexts."""
        assert (plan.epoch, plan.step) == (result.epoch, result.step)
        under_way, self._under_way = self._under_way, ()
        for job in under_way:
            if job.id not in self._running:
                continue  # cancelled meanwhile
            if isinstance(plan.work, Prefill):
                self._commit_chunk(job, len(plan.work.token_ids), now)
            elif isinstance(job, Sequence):
                self._commit_token(job, result.token_ids[job.id], result.logprobs.get(job.id))
        return self.drain()

    def drain(self) -> list[Outcome]:
        """What streams must be told, in order; each outcome is given once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _commit_chunk(self, job: Job, num_tokens: int, now: float) -> None:
        job.num_read += num_tokens
        cached = job.start if isinstance(job, Sequence) else 0
        self._outcomes.append((job.id, Progress(cached + job.num_read, cached + len(job.token_ids))))
        self._sort_in(job)
        if isinstance(job, Ingest) and not job.is_prefilling:
            self._acknowledge(job, now)

    def _acknowledge(self, job: Ingest, now: float) -> None:
        assert job.segment is not None
        self.segments.retain([job.segment])
        self.contexts.append(job.context, job.segment, now, job.settings)
        self._outcomes.append((job.id, Acknowledged(job.context)))
        self.finish(job)

    def _commit_token(self, job: Sequence, token: int, logprobs: Logprobs | None) -> None:
        job.num_read = len(job.token_ids)
        told = (logprobs,) if logprobs is not None else ()
        self._outcomes.append((job.owner, Tokens(job.num_generated, (token,), told, job.sample)))
        job.num_generated += 1
        job.last_token = token
        if token in job.end_tokens:
            self._end(job, "end_token")
        elif token in job.sampling.stop_tokens:
            self._end(job, "stop_token")
        elif job.num_generated == job.sampling.max_tokens:
            self._end(job, "length")

    def _end(self, job: Sequence, reason: EndReason) -> None:
        counts = (job.num_prompt, job.num_cached, job.num_generated)
        self._outcomes.append((job.owner, Ended(reason, *counts, 0.0, 0.0, 0.0, job.sample)))
        self.finish(job)

    # --- finish, cancel ---

    def finish(self, job: Job) -> None:
        """Gives back all that a running job holds."""
        del self._running[job.id]
        if self._decoding.pop(job.id, None) is None and job in self._prefilling:
            self._prefilling.remove(job)
        assert job.segment is not None
        assert job.reservation is not None
        self.segments.release((*job.path.segments, job.segment))
        self._placer.release(job.reservation)
        if isinstance(job, Sequence):
            self._forgotten.append(job.id)

    def cancel(self, job_id: int) -> bool:
        """Ends a job wherever it is. Its blocks are free at once: any step that reuses them comes later."""
        if samples := [job for job in self._running.values() if job.owner == job_id]:
            for job in samples:
                self.finish(job)
            return True
        for job in self._waiting:
            if job.id == job_id:
                self._waiting.remove(job)
                self.segments.release(job.path.segments)
                return True
        return False

    def cancel_sample(self, job_id: int, sample: int) -> bool:
        """Ends one sample of a job; the others go on. False when there is none that runs."""
        job = self._running.get(job_id + sample)
        if job is None or job.owner != job_id or not isinstance(job, Sequence) or job.num_tails > 1:
            return False
        self.finish(job)
        return True

    def fork_context(self, source: str, context_id: str, num_tokens: int | None = None, now: float = 0.0) -> Context:
        """A new context of the first `num_tokens` tokens of another, by default all; both go on by themselves.

        Raises NotFound, AlreadyExists, or InvalidArgument naming token_count.
        """
        if self._is_read_into(context_id):
            raise AlreadyExists(f"contexts/{context_id}")
        return self.contexts.fork(source, context_id, num_tokens, now)

    def delete_context(self, context_id: str) -> list[int]:
        """Deletes a context and gives the ids of the ingests into it, which are cancelled. Raises NotFound."""
        self.contexts.delete(context_id)
        ids = [job.id for job in self._jobs() if isinstance(job, Ingest) and job.context == context_id]
        return [job_id for job_id in ids if self.cancel(job_id)]

    def tokens_by_rank(self) -> list[int]:
        """Tokens whose keys and values each rank holds for contexts and jobs: what is only kept is as good as free."""
        held = [0] * len(self._placer.pools)
        needed = (segment for segment in self.segments if segment.num_references > segment.num_kept)
        for run in (run for segment in needed for run in segment.runs):
            held[run.rank] += len(run)
        return held

    def check(self) -> None:
        """Blocks, segments, references and promises all add up."""
        check_scheduler(self.segments, self.contexts, self._placer, tuple(self._waiting), tuple(self._running.values()))
        queued = [job.id for job in self._prefilling] + list(self._decoding)
        busy = {job.id for job in self._under_way}
        assert len(queued) == len(set(queued))
        assert set(queued) <= set(self._running) <= set(queued) | busy


def check_scheduler(
    segments: Segments, contexts: Contexts, placer: Placer, waiting: tuple[Job, ...], running: tuple[Job, ...]
) -> None:
    """Every reference has an owner, every used block a segment, every promise a running job."""
    segments.check()
    contexts.check()
    placer.check(run for segment in segments for run in segment.runs)
    owners: dict[int, int] = {}
    paths = [context.path for context in contexts.list()] + [job.path for job in (*waiting, *running)]
    for segment in [s for path in paths for s in path.segments] + [job.segment for job in running if job.segment]:
        owners[segment.id] = owners.get(segment.id, 0) + 1
    assert owners == {s.id: s.num_references - s.num_kept for s in segments if s.num_references > s.num_kept}
    assert placer.num_reserved == sum(job.reservation.left for job in running if job.reservation)
