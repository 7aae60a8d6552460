"""The lives of jobs, from admission to their end. Pure: no clock, no I/O; the engine owns both.

A job is admitted to a queue, begins in its turn when its blocks can be reserved, and then can never run out of room; a
higher priority may send it back to the queue.
"""

from collections.abc import Iterable
from functools import partial

from coordinator.deadlines import Deadlines
from coordinator.events import (
    Acknowledged,
    Document,
    Ended,
    EndReason,
    Outcome,
    Prompt,
    Started,
    Tokens,
)
from coordinator.placement.blocks import Placer
from coordinator.placement.contexts import Context, Contexts
from coordinator.placement.positions import Positions
from coordinator.placement.segments import Segments
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.jobs import Ingest, Job, Sequence
from coordinator.scheduling.laws import check_holdings, check_jobs
from coordinator.scheduling.limits import Limits
from coordinator.scheduling.pauses import Pauses
from coordinator.scheduling.planner import Planner
from coordinator.scheduling.preemption import Crowd, Room
from coordinator.scheduling.queue import Queue
from coordinator.scheduling.sharing import Prompts
from coordinator.scheduling.speeds import Speeds
from longleaf.channel.step import Prefill, StepPlan, StepResult
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, DeadlineExceeded, ResourceExhausted
from longleaf.messages import Progress
from longleaf.sampling import Token


class Scheduler:
    """Jobs, their segments and their blocks. Plans are committed in the order in which they were scheduled.

    Blocks that are freed while plans under way still write to them may be given out again at once: the plan that uses
    them anew is scheduled later, and ranks execute plans in order.

    Times called `now` are seconds on the engine's clock.
    """

    def __init__(self, config: EngineConfig, placer: Placer, positions: Positions, epoch: int) -> None:
        self._config = config
        self._placer = placer
        self.segments = Segments(placer)
        self._limits = Limits(config, placer, self.segments, positions)
        self.contexts = Contexts(self.segments)
        self.speeds = Speeds()
        self._prompts = Prompts(self.segments, placer, self._limits)
        self._room = Room(config, placer, self.contexts, self.segments, self.speeds)
        self._admission = Admission(config, self._limits, self.contexts, self.segments, self._room, self.speeds)
        self._planner = Planner(config, placer, self.segments, self.speeds, epoch)
        self._deadlines = Deadlines[int]()
        self._expiries = Deadlines[int]()
        """When the contexts of ingests expire, since the epoch."""
        self._pauses = Pauses(config.max_sequences + config.max_waiting)
        self._queue = Queue()
        self._may_begin = False
        """Something has changed since nobody in the queue had room."""
        self._running: dict[int, Job] = {}
        self._outcomes: list[Outcome] = []
        self._now = 0.0

    @property
    def num_waiting(self) -> int:
        """Jobs of which nothing runs, however many samples each of them has."""
        return len({job.owner for job in self._queue} - {job.owner for job in self._running.values()})

    @property
    def num_running(self) -> int:
        """Jobs, however many samples each of them has."""
        return len({job.owner for job in self._running.values()})

    @property
    def num_unread(self) -> int:
        """Jobs that are paused: nobody reads what they say. They run or wait, and keep nobody from doing so."""
        return len(self._pauses)

    @property
    def _num_in_line(self) -> int:
        """Jobs that wait for room."""
        in_line = {job.owner for job in self._queue if not job.is_paused}
        return len(in_line - {job.owner for job in self._running.values()})

    @property
    def next_deadline(self) -> float | None:
        """When `schedule` has something to end."""
        return self._deadlines.next

    def positions(self) -> dict[int, Started]:
        """What the generations in the queue are told, by job: 1 is next."""
        order = enumerate(self._queue.order(), start=1)
        told = ((at, job) for at, job in order if isinstance(job, Sequence) and job.speaks_for_all)
        return {job.owner: job.started(at) for at, job in told}

    # --- admit ---

    def admit(self, job_id: int, asked: Prompt | Document, now: float = 0.0) -> None:
        """Queues a generation, whose sample number i runs under the id job_id + i, or a document.

        Raises InvalidArgument, NotFound, AlreadyExists, ResourceExhausted or DeadlineExceeded, and then keeps nothing.
        """
        if isinstance(asked, Prompt):
            self._enqueue(self._admission.sequence(job_id, asked), now)
        else:
            is_busy = self._is_read_into(asked.context)
            self._enqueue(self._admission.ingest(job_id, asked, is_busy=is_busy), now)
            self._expiries.add(job_id, asked.settings.ingest_expiry)

    def _is_read_into(self, context: str) -> bool:
        return any(job.document.context == context for job in self._jobs() if isinstance(job, Ingest))

    def _enqueue(self, job: Job, now: float) -> None:
        if self._num_in_line >= self._config.max_waiting:
            self._begin_waiting()  # those for whom there is room only wait for the next step
        if (num_in_line := self._num_in_line) >= self._config.max_waiting:
            seconds = self.speeds.retry_seconds(num_in_line)
            raise ResourceExhausted("queue", f"{num_in_line:,} requests wait already", seconds)
        self._admission.check(job, list(self._queue), list(self._running.values()), now)
        self.segments.retain(job.origin)
        self.segments.retain(job.path, job.origin)
        self._deadlines.add(job.id, job.claim.end)
        self._queue.add(job)
        self._planner.turns.enter(job.claim.client)
        self._may_begin = True

    def _jobs(self) -> Iterable[Job]:
        yield from self._queue
        yield from self._running.values()

    # --- schedule ---

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None when nothing is ready or enough is under way. Outcomes may appear: see `drain`."""
        self._now = now
        for job_id in self._deadlines.passed(now):
            self._outcomes.append((job_id, DeadlineExceeded("the deadline has passed")))
            self.cancel(job_id)
        if self._planner.is_full:
            return None
        self._begin_waiting()
        return self._planner.plan(self._running.values())

    def _begin_waiting(self) -> None:
        while self._may_begin:
            if (job := self._queue.take(partial(self._reserve, Crowd(self._running.values())))) is None:
                assert self._running or not self._queue.order(), "a queued job can never begin"
                self._may_begin = False
                return
            job.num_begins += 1
            job.last_turn = self._planner.step
            self._running[job.id] = job
            if isinstance(job, Sequence):
                if job.speaks_for_all:
                    self._outcomes.append((job.owner, job.started()))
                self._answer(job)

    def _reserve(self, crowd: Crowd, job: Job) -> bool:
        """Whether there is room for the job, perhaps after others have given way: then its blocks are promised."""
        has_places = self._room.has_places(job, crowd)
        reservation = self._prompts.reserve(job) if has_places else None
        if reservation is None:
            if (victims := self._room.victims(job, crowd)) is None:
                return False
            for victim in victims:
                self._stop(victim)
                self._prompts.preempt(victim)
                self._queue.add(victim)
            reservation = self._prompts.reserve(job)
            assert reservation is not None
        job.begin(self.segments.create(job.path, job.rope), reservation)
        return True

    def _answer(self, job: Sequence) -> None:
        """Lets the samples of a job answer, once its chunks are read."""
        if job.num_read >= job.num_prefill:
            self._running |= {sample.id: sample for sample in self._prompts.share(job)}
            self._may_begin |= self._placer.windows is not None  # blocks of windows that were needed to read are free

    # --- commit ---

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[Outcome]:
        """Takes in what the ranks did. `now` in seconds since the epoch dates contexts."""
        assert (plan.epoch, plan.step) == (result.epoch, result.step)
        self.speeds.measure(plan, result.seconds - sum(found.seconds for found in result.comparisons.values()))
        for job in self._planner.land(plan, self._running):
            if job.id in result.not_finite or not result.has_finite_keys:
                self._outcomes.append((job.owner, job.failure(plan.work)))
                self.finish(job)
            elif isinstance(plan.work, Prefill):
                job.seconds_per_token = result.seconds / len(plan.work.token_ids)
                self._commit_chunk(job, len(plan.work.token_ids), now)
            elif isinstance(job, Sequence):
                job.comparison = result.comparisons.get(job.id)
                self._commit_token(job, result.tokens[job.id])
        return self.drain()

    def drain(self) -> list[Outcome]:
        """What streams must be told, in order; each outcome is given once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _commit_chunk(self, job: Job, num_tokens: int, now: float) -> None:
        job.num_read += num_tokens
        if isinstance(job, Ingest):
            self._outcomes.append((job.id, Progress(job.num_read, len(job.token_ids))))
            if job.num_read == job.num_prefill:
                self._acknowledge(job, now)
        elif isinstance(job, Sequence):
            if job.speaks_for_all:
                self._outcomes.append((job.owner, Progress(job.start + job.num_read, job.start + len(job.token_ids))))
            self._answer(job)

    def _acknowledge(self, job: Ingest, now: float) -> None:
        assert job.holding is not None
        document = job.document
        self.contexts.append(document.context, job.holding.segment, now, document.settings, job.capacity)
        self._outcomes.append((job.id, Acknowledged(document.context)))
        self.finish(job)

    def _commit_token(self, job: Sequence, token: Token) -> None:
        self._outcomes.append((job.owner, Tokens(job.num_generated, (token,), job.sample)))
        job.take(token.id)
        if token.id in job.end_tokens:
            self._end(job, "end_token")
        elif token.id in job.sampling.stop_tokens:
            self._end(job, "stop_token")
        elif job.num_generated == job.sampling.max_tokens:
            self._end(job, "length")

    def _end(self, job: Sequence, reason: EndReason) -> None:
        counts = (job.num_prompt, job.num_cached, job.num_generated)
        self._outcomes.append((job.owner, Ended(reason, *counts, 0.0, 0.0, 0.0, job.sample, job.comparison)))
        self.finish(job)

    # --- finish, cancel, pause ---

    def finish(self, job: Job) -> None:
        """Gives back all that a running job holds."""
        self._stop(job)
        self.speeds.ended(self._now, bool(self._running or self._queue))
        self._leave(job)

    def _stop(self, job: Job) -> None:
        """Takes a job off the running ones; its path stays retained."""
        del self._running[job.id]
        assert job.holding is not None
        assert job.reservation is not None
        self.segments.drop(job.holding.segment)
        self._placer.release(job.reservation)
        self._queue.settle(job)
        self._may_begin = True
        if isinstance(job, Sequence):
            self._planner.forget(job.id)

    def _leave(self, job: Job) -> None:
        self.segments.release(job.path, job.origin)
        self.segments.release(job.origin)
        self._may_begin = True
        others = list(self._jobs())
        if not any(other.owner == job.owner for other in others):
            self._deadlines.discard(job.owner)
            self._expiries.discard(job.owner)
            self._pauses.discard(job.owner)
        clients = {other.claim.client for other in others}
        self._queue.turns.keep(clients)
        self._planner.turns.keep(clients)

    def cancel(self, job_id: int) -> bool:
        """Ends a job wherever it is. Its blocks are free at once: any step that reuses them comes later."""
        samples = [job for job in self._jobs() if job.owner == job_id]
        for job in samples:
            self._drop(job)
        return bool(samples)

    def cancel_sample(self, job_id: int, sample: int) -> bool:
        """Ends one sample of a job; the others go on. False when it does not answer yet, or any more."""
        for job in self._jobs():
            if (job.owner, job.id) == (job_id, job_id + sample) and isinstance(job, Sequence) and job.num_tails == 1:
                self._drop(job)
                return True
        return False

    def _drop(self, job: Job) -> None:
        if self._running.get(job.id) is job:
            self.finish(job)
        else:
            self._queue.remove(job.id)
            self._leave(job)

    def pause(self, job_id: int, is_paused: bool) -> None:
        """Stops or resumes the rows of a job whose reader is behind. It keeps its blocks until others need them; jobs
        that have ended are none of its business. Too many that are paused end: see `drain`."""
        for job in self._jobs():
            if job.owner == job_id:
                job.is_paused = is_paused
                self._may_begin = True
                self._pauses.add(job_id, job.claim.client) if is_paused else self._pauses.discard(job_id)
        while (surplus := self._pauses.surplus) is not None:
            told = f"more than {self._pauses.limit} are not read, and this one the longest of its client's"
            self._outcomes.append((surplus, ResourceExhausted("stream", told)))
            self.cancel(surplus)

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
        self._may_begin = True
        ids = [job.id for job in self._jobs() if isinstance(job, Ingest) and job.document.context == context_id]
        return [job_id for job_id in ids if self.cancel(job_id)]

    @property
    def next_expiry(self) -> float | None:
        """When a context expires next, or one that is not there yet."""
        times = (self.contexts.next_expiry, self._expiries.next)
        return min((time for time in times if time is not None), default=None)

    def expire_ingests(self, now: float) -> list[int]:
        """Cancels the ingests whose contexts would be gone, `now` seconds after the epoch, and gives their ids."""
        return [job_id for job_id in self._expiries.passed(now) if self.cancel(job_id)]

    def check(self) -> None:
        """Blocks, segments, references, promises and jobs all add up."""
        waiting, running = tuple(self._queue), tuple(self._running.values())
        check_holdings(self.segments, self.contexts, self._placer, waiting, running)
        check_jobs(waiting, running, self._planner.under_way)
        assert set(self._pauses) == {job.owner for job in self._jobs() if job.is_paused}
        assert set(self._expiries) <= {job.id for job in self._jobs() if isinstance(job, Ingest)}
        assert set(self._deadlines) == {job.owner for job in self._jobs() if job.claim.end is not None}
