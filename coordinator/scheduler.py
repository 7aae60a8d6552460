"""What the next step does. Pure: no clock, no I/O; the engine owns both.

A job is admitted to a queue, begins in its turn when its blocks can be reserved, and then can never run out of room; a
higher priority may send it back to the queue. Steps alternate between one chunk of one job and one token of every
sequence that is ready.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from typing import NamedTuple

import msgspec

from coordinator.blocks import Placer
from coordinator.budget import Budget
from coordinator.contexts import Contexts, Segments
from coordinator.deadlines import Deadlines
from coordinator.events import Ended, EndReason, Event, Progress, Prompt, Started, Tokens
from coordinator.holdings import check_holdings, check_jobs
from coordinator.jobs import NO_CLAIM, Claim, Ingest, Job, Sequence
from coordinator.limits import Limits
from coordinator.queue import Queue, Turns
from coordinator.room import Room
from coordinator.speeds import Speeds
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, LongleafError, ResourceExhausted
from longleaf.step import Decode, Prefill, StepPlan, StepResult

MAX_UNDER_WAY = 2
"""Plans that the ranks may hold: the one they execute, and the one after it."""


class Acknowledged(msgspec.Struct, frozen=True):
    """The document of an ingest is part of its context."""

    context: str


Outcome = tuple[int, Event | Acknowledged | LongleafError]
"""Job id, and what its stream gets. An error, Ended and Acknowledged are the last one of a job."""


class Flight(NamedTuple):
    """A plan under way, and the jobs it works for, each with the number of times that it has begun: what the plan
    yields for a job that has ended since, or begun anew, is dropped."""

    plan: StepPlan
    jobs: tuple[tuple[Job, int], ...]


class Scheduler:
    """Jobs, their segments and their blocks. Plans are committed in the order in which they were scheduled; two may be
    under way, so that the ranks find the next one when they have finished the first.

    Blocks that are freed while plans under way still write to them may be given out again at once: the plan that uses
    them anew is scheduled later, and ranks execute plans in order.

    Times called `now` are seconds on the engine's clock.
    """

    def __init__(self, config: EngineConfig, placer: Placer, max_positions: int, epoch: int) -> None:
        self._config = config
        self._placer = placer
        self._limits = Limits(config, placer, max_positions)
        self._epoch = epoch
        self.segments = Segments(placer)
        self.contexts = Contexts(self.segments)
        self.speeds = Speeds()
        self._room = Room(config, placer, self.contexts, self.speeds)
        self._budget = Budget(config, len(placer.pools), self.speeds)
        self._deadlines = Deadlines()
        self._queue = Queue()
        self._may_begin = False
        """Something has changed since nobody in the queue had room."""
        self._running: dict[int, Job] = {}
        self._chunk_turns = Turns()
        self._forgotten: list[int] = []
        self._outcomes: list[Outcome] = []
        self._flights: deque[Flight] = deque()
        self._step = 0
        self._was_prefill = False
        self._now = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def next_deadline(self) -> float | None:
        """When `schedule` has something to end."""
        return self._deadlines.next

    def positions(self) -> dict[int, Started]:
        """What the generations in the queue are told, by job: 1 is next."""
        order = enumerate(self._queue.order(), start=1)
        return {job.id: Started(job.num_prompt, job.start, at) for at, job in order if isinstance(job, Sequence)}

    # --- admit ---

    def admit(self, job_id: int, prompt: Prompt, now: float = 0.0) -> None:
        """Queues a generation. Raises InvalidArgument, NotFound, ResourceExhausted or DeadlineExceeded, and then keeps
        nothing."""
        prompt.sampling.check()
        path = self.contexts.get(prompt.context).path if prompt.context is not None else ()
        if not prompt.token_ids:
            raise InvalidArgument("input", "has no tokens")
        job = Sequence(job_id, path, prompt, self._limits.num_prefill(len(prompt.token_ids)))
        self._limits.check(job, "input", 1)
        job.num_blocks = self._limits.check(job, "sampling.max_token_count", prompt.sampling.max_tokens)
        self._enqueue(job, now)

    def admit_ingest(
        self,
        job_id: int,
        context: str,
        token_ids: TokenIds[int],
        *,
        append: bool,
        claim: Claim = NO_CLAIM,
        now: float = 0.0,
    ) -> None:
        """Queues a document. Raises AlreadyExists, NotFound, InvalidArgument, ResourceExhausted or DeadlineExceeded."""
        is_busy = any(job.context == context for job in self._jobs() if isinstance(job, Ingest))
        if not append and (is_busy or context in self.contexts):
            raise AlreadyExists(f"contexts/{context}")
        path = self.contexts.get(context).path if append else ()
        if not token_ids:
            raise InvalidArgument("text", "has no tokens")
        if is_busy:
            seconds = self.speeds.retry_seconds(1)
            raise ResourceExhausted(f"contexts/{context}", "another document is being appended", seconds)
        job = Ingest(job_id, path, token_ids, context, claim)
        job.num_blocks = self._limits.check(job, "text", 0)
        self._enqueue(job, now)

    def _enqueue(self, job: Job, now: float) -> None:
        if self.num_waiting >= self._config.max_waiting:
            self._begin_waiting()  # those for whom there is room only wait for the next step
        if self.num_waiting >= self._config.max_waiting:
            seconds = self.speeds.retry_seconds(self.num_waiting)
            raise ResourceExhausted("queue", f"{self.num_waiting} requests wait already", seconds)
        self._room.check(job, self._jobs())
        self._check_deadline(job, now)
        self.segments.retain(job.path)
        self._deadlines.add(job.id, job.claim.deadline)
        self._queue.add(job)
        self._chunk_turns.enter(job.claim.client)
        self._may_begin = True

    def _check_deadline(self, job: Job, now: float) -> None:
        """Raises DeadlineExceeded when it cannot be met."""
        if job.claim.deadline is None:
            return
        left = job.claim.deadline - now
        needed = self.speeds.least_seconds(job, self._queue, self._running.values())
        if left <= 0 or needed > left:
            raise DeadlineExceeded(f"{max(0.0, left):.3g} seconds are left, and {needed:.3g} are needed at least")

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
        if len(self._flights) == MAX_UNDER_WAY:
            return None
        self._begin_waiting()
        prefilling = self._prefilling()
        decoding = [job for job in self._running.values() if isinstance(job, Sequence) and job.has_rows]
        if not prefilling and not decoding:
            return None
        self._was_prefill = bool(prefilling) and not (self._was_prefill and decoding)
        if self._was_prefill:
            return self._plan_chunk(prefilling, is_alone=not decoding)
        return self._plan_rows(decoding)

    def _begin_waiting(self) -> None:
        while self._may_begin:
            if (job := self._queue.take(self._make_room)) is None:
                assert self._running or not self._queue.order(), "a queued job can never begin"
                self._may_begin = False
                return
            reservation = self._placer.reserve(job.num_blocks)
            assert reservation is not None
            job.begin(self.segments.create(job.start), reservation)
            job.last_turn = self._step
            self._running[job.id] = job
            if isinstance(job, Sequence):
                self._outcomes.append((job.id, Started(job.num_prompt, job.start)))

    def _make_room(self, job: Job) -> bool:
        """Whether the job can begin, after those that must give way have given way."""
        victims = self._room.victims(job, self._running.values())
        for victim in victims or ():
            self._preempt(victim)
        return victims is not None

    def _preempt(self, job: Sequence) -> None:
        """Frees what the sequence holds, but for its path, and queues it as old as it is."""
        self._stop(job)
        job.preempt()
        job.num_prefill = self._limits.num_prefill(len(job.token_ids))
        self._queue.add(job)

    def _prefilling(self) -> list[Job]:
        """Jobs that may have the next chunk; none while a chunk is under way. A chunk is long, so little is lost when
        the next one is sent only after it, and whoever comes or is cancelled meanwhile waits for one chunk, not two."""
        if any(isinstance(flight.plan.work, Prefill) for flight in self._flights):
            return []
        return [job for job in self._running.values() if job.has_chunks]

    def _plan_chunk(self, jobs: list[Job], *, is_alone: bool) -> StepPlan:
        job = self._chunk_turns.order(jobs, lambda job: job.last_turn)[0]
        work = job.next_chunk(self._placer, self._budget.chunk_size(job, is_alone=is_alone))
        job.last_turn = self._step + 1
        self._chunk_turns.take(job.claim.client, len(work.token_ids))
        return self._plan(work, [job])

    def _plan_rows(self, jobs: TokenIds[Sequence]) -> StepPlan:
        return self._plan(Decode(tuple(job.next_row(self._placer) for job in jobs)), jobs)

    def _plan(self, work: Prefill | Decode, jobs: TokenIds[Job]) -> StepPlan:
        self._step += 1
        forgotten, self._forgotten = tuple(self._forgotten), []
        plan = StepPlan(self._epoch, self._step, work, self.segments.take_forgotten(), forgotten)
        self._flights.append(Flight(plan, tuple((job, job.num_begins) for job in jobs)))
        return plan

    # --- commit ---

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[Outcome]:
        """Takes in what the ranks did. `now` in seconds since the epoch dates contexts."""
        flight = self._flights.popleft()
        assert flight.plan is plan, "plans are committed in order"
        assert (plan.epoch, plan.step) == (result.epoch, result.step)
        self.speeds.measure(plan, result.seconds)
        for job, num_begins in flight.jobs:
            if self._running.get(job.id) is not job or job.num_begins != num_begins:
                continue
            if isinstance(plan.work, Prefill):
                job.seconds_per_token = result.seconds / len(plan.work.token_ids)
                self._commit_chunk(job, len(plan.work.token_ids), now)
            elif isinstance(job, Sequence):
                self._commit_token(job, result.token_ids[job.id])
        return self.drain()

    def drain(self) -> list[Outcome]:
        """What streams must be told, in order; each outcome is given once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _commit_chunk(self, job: Job, num_tokens: int, now: float) -> None:
        job.num_read += num_tokens
        cached = job.start if isinstance(job, Sequence) else 0
        self._outcomes.append((job.id, Progress(cached + job.num_read, cached + len(job.token_ids))))
        if isinstance(job, Ingest) and job.num_read == job.num_prefill:
            self._acknowledge(job, now)

    def _acknowledge(self, job: Ingest, now: float) -> None:
        assert job.segment is not None
        self.segments.retain([job.segment])
        self.contexts.append(job.context, job.segment, now)
        self._outcomes.append((job.id, Acknowledged(job.context)))
        self.finish(job)

    def _commit_token(self, job: Sequence, token: int) -> None:
        self._outcomes.append((job.id, Tokens(job.num_generated, (token,))))
        job.take(token)
        if token in job.end_tokens:
            self._end(job, "end_token")
        elif job.num_generated == job.sampling.max_tokens:
            self._end(job, "length")

    def _end(self, job: Sequence, reason: EndReason) -> None:
        self._outcomes.append((job.id, Ended(reason, job.num_prompt, job.start, job.num_generated, 0.0, 0.0, 0.0)))
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
        assert job.segment is not None
        assert job.reservation is not None
        self.segments.release([job.segment])
        self._placer.release(job.reservation)
        self._queue.settle(job)
        self._may_begin = True
        if isinstance(job, Sequence):
            self._forgotten.append(job.id)

    def _leave(self, job: Job) -> None:
        self.segments.release(job.path)
        self._deadlines.discard(job.id)
        clients = {other.claim.client for other in self._jobs()}
        self._queue.keep(clients)
        self._chunk_turns.keep(clients)

    def cancel(self, job_id: int) -> bool:
        """Ends a job wherever it is. Its blocks are free at once: any step that reuses them comes later."""
        if job_id in self._running:
            self.finish(self._running[job_id])
        elif (job := self._queue.remove(job_id)) is not None:
            self._may_begin = True
            self._leave(job)
        else:
            return False
        return True

    def pause(self, job_id: int, is_paused: bool) -> None:
        """Stops or resumes the rows of a sequence whose reader is behind. It keeps its blocks until others need them;
        jobs that have ended are none of its business."""
        for job in self._jobs():
            if job.id == job_id:
                job.is_paused = is_paused
                self._may_begin = True

    def delete_context(self, context_id: str) -> list[int]:
        """Deletes a context and gives the ids of the ingests into it, which are cancelled. Raises NotFound."""
        self.contexts.delete(context_id)
        self._may_begin = True
        ids = [job.id for job in self._jobs() if isinstance(job, Ingest) and job.context == context_id]
        return [job_id for job_id in ids if self.cancel(job_id)]

    def check(self) -> None:
        """Blocks, segments, references, promises and jobs all add up."""
        waiting, running = tuple(self._queue), tuple(self._running.values())
        check_holdings(self.segments, self.contexts, self._placer, waiting, running)
        check_jobs(waiting, running, {job.id for flight in self._flights for job, _ in flight.jobs})
        assert set(self._deadlines) == {job.id for job in self._jobs() if job.claim.deadline is not None}
