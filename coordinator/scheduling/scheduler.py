"""The scheduler: requests from admission to their end. Pure: no clock, no I/O; the engine owns both.

A request is admitted to a queue, begins in its turn when its blocks can be reserved, and from then on cannot run out of
blocks. A request with a higher priority may preempt it, which returns it to the queue.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

from coordinator.auth.tenant_usage import TenantUsage
from coordinator.engine_messages import (
    Acknowledged,
    Admitted,
    DocumentPrompt,
    Outcome,
    Prompt,
    Sealed,
    Tokens,
)
from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer, Reservation
from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.kv_cache.eviction import ContextEvictor
from coordinator.kv_cache.kv_cache import KvCache
from coordinator.kv_cache.positions import Positions
from coordinator.kv_cache.segments import SegmentStore
from coordinator.recovery.job_recovery import JobRecovery
from coordinator.recovery.recompute import RecoveryFailed
from coordinator.recovery.recovery import MOVED_BLOCKS, RecoveryManager
from coordinator.recovery.restore import none_stored
from coordinator.scheduling.admission import Admission
from coordinator.scheduling.context_activation import ContextActivation
from coordinator.scheduling.deferral import Deferral
from coordinator.scheduling.fair_queue import Queue
from coordinator.scheduling.invariants import audit_jobs, audit_placements
from coordinator.scheduling.job_lifecycle import JobLifecycle
from coordinator.scheduling.jobs import IngestJob, Job
from coordinator.scheduling.limits import JobLimits
from coordinator.scheduling.planner import JobFailed, Planner
from coordinator.scheduling.preemption import Preemption, RunningSet
from coordinator.scheduling.prefill_cursor import GrowingSegment
from coordinator.scheduling.prompt_sharing import Sharing
from coordinator.scheduling.requests import Request, Requests
from coordinator.scheduling.sequences import SequenceJob
from coordinator.scheduling.speculation import Drafter
from coordinator.scheduling.speculation_stats import DraftCounts
from coordinator.scheduling.throughput import Speeds
from longleaf.config import EngineConfig
from longleaf.errors import AlreadyExists, DeadlineExceeded, LongleafError, ResourceExhausted, Unavailable
from longleaf.rank_protocol.step import Prefill, StepPlan, StepResult, Work
from longleaf.types import Progress

MAX_FAULTS = 8
"""Maximum number of unexpected errors in one call of `schedule`; further work then waits for the next call."""
FAILED = "an unexpected error ended this request; see the log of the service"
NEVER_BEGINS = "it needs more memory than is available"


class Scheduler:
    """Requests, their segments and their blocks. Plans are committed in the order in which they were scheduled.

    Freed blocks may be allocated again at once, even if plans under way still write to them: the plan that reuses them
    is scheduled later, and ranks execute plans in order.

    Times called `now` are seconds on the engine's clock, except where a method says "since the epoch".
    """

    def __init__(
        self,
        config: EngineConfig,
        placer: BlockPlacer,
        positions: Positions,
        epoch: int,
        max_moved_blocks: int = MOVED_BLOCKS,
        *,
        is_durable: bool = False,
        is_stored: Callable[[int], bool] = none_stored,
        drafter: Drafter | None = None,
    ) -> None:
        """With `is_durable`, contexts are stored elsewhere: an ingest is complete when `acknowledge` is called, and
        idle contexts are evicted to make room for others. `is_stored`: see RestorePlanner."""
        self._placer = placer
        self.segments = SegmentStore(placer, share_prefixes=config.share_prefixes, evict=self._evict)
        self.contexts = ContextTable(self.segments)
        self.speeds = Speeds()
        self.num_steps = 0
        """Number of steps so far."""
        self.num_preempted = 0
        """Number of times that a job returned to the queue so that another could begin."""
        self.num_recomputed_tokens = 0
        """Number of lost or evicted tokens that were recomputed."""
        self.drafts = DraftCounts()
        self._requests = Requests(config.max_sequences + config.max_waiting)
        limits = JobLimits(config, placer, self.segments.placements, positions)
        self._is_durable = is_durable
        self.recovery = RecoveryManager(placer, self.segments, max_moved_blocks, is_stored)
        """Recovery of lost keys. A caller that reports a result of a restore to it must call `schedule` afterwards."""
        self._activation = ContextActivation(self.contexts, self._requests, limits, self.recovery)
        evictor = ContextEvictor(placer, self.segments, self.contexts, self._activation.in_use) if is_durable else None
        cache = KvCache(placer, self.segments, self.contexts, evictor)
        self._evictor = evictor
        self._sharing = Sharing(self.segments, placer, limits)
        self._preemption = Preemption(config.max_sequences, placer, self.segments, evictor)
        self._admission = Admission(
            config, limits, self.contexts, self.segments, self._requests, self.speeds, can_evict=is_durable
        )
        self._drafter = drafter or Drafter(config.max_rows, config.max_draft_tokens, config.block_size)
        self._planner = Planner(config, placer, self.segments, self.speeds, self.recovery, self._drafter, epoch)
        self._queue = Queue()
        self._lifecycle = JobLifecycle(
            self.segments, self._requests, self._queue, self._planner, self._sharing, self.speeds
        )
        self._faults: list[Exception] = []
        self._running = self._lifecycle.running
        self._outcomes = self._lifecycle.outcomes
        self._deferral = Deferral(cache, limits, self._admission, self._lifecycle, self.recovery)
        self.job_recovery = JobRecovery(cache, limits, self.recovery, self._lifecycle, self._admission, self._deferral)
        """Continues jobs after a change of ranks."""

    def _evict(self, lacking: BlockCount) -> bool:
        return self._evictor is not None and self._evictor.free_blocks(lacking)

    @property
    def num_waiting(self) -> int:
        """Number of requests with no running job. Several samples of a request count once."""
        return len({job.request.id for job in self._queue if not job.request.is_running})

    @property
    def num_running(self) -> int:
        """Number of running requests. Several samples of a request count once."""
        return len(self._requests) - self.num_waiting

    def usage(self, tenant: str) -> TenantUsage:
        """A tenant's usage, except for storage."""
        own = [request for request in self._requests if request.scheduling.tenant == tenant]
        documents = [job.document for request in own for job in request.jobs if isinstance(job, IngestJob)]
        totals = self.contexts.totals(tenant)
        new = {document.context for document in documents if document.context not in self.contexts}
        answers = [request for request in own if not any(isinstance(job, IngestJob) for job in request.jobs)]
        num_running = sum(request.is_running for request in answers)
        return TenantUsage(
            contexts=totals.count + len(new),
            tokens=totals.num_tokens + sum(len(each.token_ids) for each in documents),
            running=num_running,
            waiting=len(answers) - num_running,
            uploads=len(documents),
        )

    @property
    def num_unread(self) -> int:
        """Number of paused requests, whose readers are behind. They run or wait without blocking others."""
        return self._requests.num_paused

    @property
    def next_deadline(self) -> float | None:
        """The next deadline that `schedule` must enforce."""
        return self._requests.deadlines.next

    def positions(self) -> dict[int, Admitted]:
        """The queue positions of waiting generations, by request. Position 1 is the next one of its tenant; other
        tenants are not counted."""
        admitted, places = dict[int, Admitted](), Counter[str]()
        for job in self._queue.order():
            tenant = job.request.scheduling.tenant
            places[tenant] += 1
            if isinstance(job, SequenceJob) and job.represents_all_samples:
                admitted[job.request.id] = job.admitted(places[tenant])
        return admitted

    # --- admission ---

    def admit(self, request_id: int, prompt: Prompt | DocumentPrompt, now: float = 0.0) -> None:
        """Queues a document, or a generation, whose sample number i runs under the id request_id + i.

        Raises InvalidArgument, NotFound, AlreadyExists, ResourceExhausted, DeadlineExceeded or Unavailable, and then
        keeps nothing.
        """
        context = self.contexts.find(prompt.context)
        try:
            with self._activation.activate(context):
                self._lifecycle.enqueue(self._admission.admit(request_id, prompt, now, self._begin_waiting))
        except Exception:
            if context is not None:  # it was protected from eviction meanwhile
                self._lifecycle.mark_changed()
            raise
        if context is not None:
            self.contexts.mark_used(context)
        if not self.job_recovery.is_over:
            self.job_recovery.report_progress()

    # --- schedule ---

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None when nothing is ready or enough is under way. It may add outcomes: see
        `pop_outcomes`."""
        self._lifecycle.set_time(now)
        for request_id in self._requests.deadlines.passed(now):
            self._outcomes.append((request_id, DeadlineExceeded("the deadline has passed")))
            self.cancel(request_id)
        if self._planner.is_full or self.job_recovery.is_between_epochs:
            return None
        for _ in range(MAX_FAULTS):
            self._begin_waiting()
            try:
                return self._planner.plan(self._running.values(), self.job_recovery.paths)
            except JobFailed as failed:
                for other in failed.others:
                    self._lifecycle.preempt(other)
                self._end_failed(failed.job, failed)
            except RecoveryFailed as failed:
                self._give_up(failed)
        return None

    def _end_failed(self, job: Job, fault: Exception) -> None:
        """Ends a job after an unexpected error; all others continue."""
        self._faults.append(fault)
        if (request := self._requests.get(job.request.id)) is not None and job in request.jobs:
            self._lifecycle.fail(job, job.failed(Unavailable(FAILED)))

    def _give_up(self, failed: RecoveryFailed) -> None:
        self._faults.append(failed)
        self.job_recovery.give_up(failed.segment)

    def pop_faults(self) -> list[Exception]:
        """Removes and returns unexpected errors, for the log. Each one ended only the job or the recovery in which it
        occurred."""
        faults, self._faults = [*self._faults, *self.recovery.restoring.pop_faults()], []
        return faults

    def _begin_waiting(self) -> None:
        if self.job_recovery.is_between_epochs:
            return
        if not self.job_recovery.is_over:
            self._deferral.update()  # first, because deferred jobs need no blocks for lost keys
            self._preempt_for_reload()
            self.job_recovery.resume()
            if self._deferral.unblock_reload():
                self._preempt_for_reload()
                self.job_recovery.resume()
        while self._lifecycle.may_begin:
            if self._deferral.update():
                self.job_recovery.resume()
                self.job_recovery.report_progress()
            running_set = RunningSet(self._running.values())
            if (
                job := self._queue.pop_next(partial(self._reserve, running_set), partial(self._is_ready, running_set))
            ) is None:
                is_recovering = not (self.job_recovery.is_over and self.job_recovery.is_confirmed)
                may_wait = self._running or is_recovering or not self._queue.order()
                if not may_wait and self._activation.is_blocked:
                    return  # the request that is being admitted may find room
                if not may_wait and (unread := self._requests.longest_paused) is not None:
                    self._end_unread(
                        unread, "its context's memory is needed by other requests, and its answer is not read"
                    )
                    continue
                if not may_wait:  # an admitted job always has room, so this is a bug; it fails only that job
                    self._lifecycle.fail(next(iter(self._queue.order())), ResourceExhausted("pool", NEVER_BEGINS))
                    continue
                self._lifecycle.mark_blocked()
                return
            if isinstance(job, SequenceJob):
                self._start(job)

    def _is_ready(self, running_set: RunningSet, job: Job) -> bool:
        """Whether a job may begin, if there is room for it."""
        if job.is_deferred or not running_set.is_allowed(job):
            return False
        is_recovered = self.job_recovery.is_over or self.job_recovery.is_ready(job)
        return is_recovered or self._deferral.is_reloading(job)

    def _reserve(self, running_set: RunningSet, job: Job) -> bool:
        """Begins the job if there is room for it, after preemptions if necessary. Returns whether it has begun."""
        if self._deferral.is_reloading(job):
            return False
        has_places = self._preemption.has_places(job, running_set)
        reservation = self._sharing.reserve(job) if has_places else None
        if reservation is None:
            if (victims := self._preemption.victims(job, running_set)) is None:
                return False
            self._preempt(victims)
            if (reservation := self._sharing.reserve(job)) is None:
                return False
        self._begin(job, reservation)
        return True

    def _preempt_for_reload(self) -> None:
        """Preempts jobs that overtook the oldest one, or are paused, if that makes enough room for the reload of its
        context."""
        if (job := self._deferral.reloading) is None:
            return
        needed = self.recovery.num_unreserved(job.request.origin)
        if needed.fits(BlockCount()):
            return
        victims = self._preemption.victims(job, RunningSet(self._running.values()), needed)
        if victims:
            self._deferral.mark_preempted()  # once, so that no job begins and is preempted in turns
            self._preempt(victims)

    def _preempt(self, victims: list[SequenceJob]) -> None:
        for victim in victims:
            self._lifecycle.preempt(victim)
        self.num_preempted += len(victims)

    def _begin(self, job: Job, reservation: Reservation) -> None:
        placement = self.segments.create(job.prefill.path, job.rope, job.request.scheduling.tenant)
        job.begin(GrowingSegment(placement, reservation), self._planner.step)
        self._running[job.id] = job

    def _start(self, job: SequenceJob) -> None:
        """Notifies the client that its job has begun. The job answers at once if it has no chunks to process."""
        if job.represents_all_samples or job.is_recomputed:
            self._outcomes.append((job.request.id, job.admitted()))
        self._answer(job)

    def _answer(self, job: SequenceJob) -> None:
        """Starts the answers of a job once its chunks are processed."""
        if job.prefill.is_over:
            others = self._sharing.share(job)
            job.request.jobs += others
            self._running |= {sample.id: sample for sample in others}
            if self._placer.windows is not None:  # window blocks for the prefill are free now
                self._lifecycle.mark_changed()

    # --- commit ---

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[Outcome]:
        """Commits the result of a plan. `now`, in seconds since the epoch, is the time stamp of contexts."""
        assert (plan.epoch, plan.step) == (result.epoch, result.step)
        self.num_steps += 1
        seconds = result.seconds - sum(found.reference_seconds for found in result.comparisons.values())
        self.speeds.measure(plan, seconds)
        self._drafter.measure(plan, seconds)
        jobs = self._planner.complete(plan)
        if self.recovery.owns(plan.work):
            try:
                self.job_recovery.commit(result)
            except RecoveryFailed as failed:
                self._give_up(failed)
            if isinstance(plan.work, Prefill) and result.has_finite_keys:
                self.num_recomputed_tokens += plan.num_tokens
        for job in jobs:
            try:
                self._commit_job(job, plan.work, result, now)
            except Exception as error:
                self._end_failed(job, error)
        return self.pop_outcomes()

    def _commit_job(self, job: Job, work: Work, result: StepResult, now: float) -> None:
        if job.id in result.not_finite or not result.has_finite_keys:
            self._outcomes.append((job.request.id, job.failure(work)))
            self._lifecycle.finish(job)
        elif isinstance(job, SequenceJob) and job.id in result.unmatched:
            self._outcomes.append((job.request.id, job.unmatched(result.unmatched[job.id])))
            self._lifecycle.finish(job)
        elif isinstance(work, Prefill):
            job.record_prefilled(len(work.token_ids), result.seconds)
            self._commit_chunk(job, now)
        elif isinstance(job, SequenceJob):
            self._commit_tokens(job, result)

    def pop_outcomes(self) -> list[Outcome]:
        """Removes and returns the outcomes to send on the streams, in order."""
        outcomes = self._outcomes.copy()
        self._outcomes.clear()
        return outcomes

    def _commit_chunk(self, job: Job, now: float) -> None:
        num_computed, total = job.prefill.num_computed, len(job.prefill.token_ids)
        self._drafter.record_prefilled(job.tail.segment, job.request.start + num_computed)
        if isinstance(job, IngestJob):
            self._outcomes.append((job.request.id, Progress(num_computed, total)))
            if job.prefill.is_over and self._is_durable:
                self._outcomes.append((job.request.id, Sealed(job)))
            elif job.prefill.is_over:
                self.acknowledge(job, now)
        elif isinstance(job, SequenceJob):
            if job.represents_all_samples:
                start = job.request.start
                self._outcomes.append((job.request.id, Progress(start + num_computed, start + total)))
            self._answer(job)

    def fail(self, request_id: int, error: LongleafError) -> None:
        """Ends a request with an error, if it has not ended. See `pop_outcomes`."""
        if (request := self._requests.get(request_id)) is not None:
            self._lifecycle.fail(request.jobs[0], error)

    def _commit_tokens(self, job: SequenceJob, result: StepResult) -> None:
        request_id, reason = job.request.id, "length"
        if not job.prompt.is_probe:
            index, attention = job.num_generated, result.attention.get(job.id, ())
            sampled, num_appended = result.tokens[job.id], 0
            job.accept([token.id for token in sampled[:-1]], self._placer)
            for token in sampled:
                num_appended += 1
                if (reason := job.append_token(token.id)) is not None:
                    break  # tokens sampled after the end of the answer are dropped
            if reason in (None, "length") and job.id in result.completed:
                reason = "stop"
            counts = (self._drafter.record_tokens(job, sampled), min(num_appended, len(sampled) - 1))
            self.drafts.add(*counts, num_appended)
            if (forced := result.forced.get(job.id)) is not None:
                self._drafter.record_forced(job, forced)
            event = Tokens(index, sampled[:num_appended], job.sample, attention[:num_appended], *counts)
            self._outcomes.append((request_id, event))
        if reason is not None:
            self._outcomes.append((request_id, job.ended(reason, result)))
            self._lifecycle.end_answer(job)
        elif job.has_outgrown_rope:
            self._recompute(job)

    def _recompute(self, job: SequenceJob) -> None:
        """Recomputes the prompt and the answer so far with the rope for longer sequences: at once if there is room,
        because the job has its turn already, else when it is next in the queue."""
        self._lifecycle.preempt(job)
        may_begin = self.job_recovery.is_over and not job.request.is_paused
        if may_begin and (reservation := self._sharing.reserve(job)) is not None:
            self._queue.resume(job)
            self._begin(job, reservation)
            self._start(job)

    def measure_gap(self, seconds: float, is_ahead: bool) -> None:
        """Records the time between two decode steps, the second sent before (`is_ahead`) or after the first was
        answered."""
        self._drafter.measure_gap(seconds, is_ahead=is_ahead)

    def learn(self) -> None:
        """Does work that can wait until the ranks have the next plan."""
        self._drafter.learn()

    # --- cancellation, pauses ---

    def cancel(self, request_id: int) -> bool:
        """Ends a request, whether it waits or runs. Its blocks are free at once, because any step that reuses them
        comes later."""
        request = self._requests.get(request_id)
        for job in tuple(request.jobs) if request else ():
            self._lifecycle.end_early(job)
        return request is not None

    def cancel_sample(self, request_id: int, sample: int) -> bool:
        """Ends one sample of a request; the others continue. Returns False when the sample does not answer yet or has
        ended."""
        request = self._requests.get(request_id)
        for job in request.jobs if request else ():
            if isinstance(job, SequenceJob) and job.samples == range(sample, sample + 1):
                self._lifecycle.end_early(job)
                return True
        return False

    def pause(self, request_id: int, is_paused: bool) -> None:
        """Pauses or resumes the rows of a request whose reader is behind. It keeps its blocks until others need them.
        Does nothing for a request that has ended. Ends the surplus when too many requests are paused: see
        `pop_outcomes`."""
        if (request := self._requests.get(request_id)) is None:
            return
        self._requests.pause(request, is_paused)
        self._lifecycle.mark_changed()
        while (surplus := self._requests.surplus) is not None:
            message = (
                f"more than {self._requests.max_unread} answers are unread; this one has been unread the longest of "
                "the client with the most"
            )
            self._end_unread(surplus, message)

    def _end_unread(self, request: Request, reason: str) -> None:
        self._outcomes.append((request.id, ResourceExhausted("stream", reason)))
        self.cancel(request.id)

    # --- contexts ---

    def acknowledge(self, job: IngestJob, now: float) -> None:
        """Creates the context of a Sealed document once the document is durable, or appends to it. The job must be
        running; `now` is in seconds since the epoch. See `pop_outcomes`."""
        assert job.is_running and job.prefill.is_over
        document, capacity = job.document, job.request.capacity
        self.contexts.append(document.context, job.tail.segment, now, document.settings, capacity, document.upload_id)
        self._outcomes.append((job.request.id, Acknowledged(document.context)))
        self._lifecycle.finish(job)

    def is_ingesting_into(self, context_id: str) -> bool:
        """Whether a document is being ingested into a context, which may not exist yet."""
        return bool(self._requests.ingests_into(context_id))

    def preload(self) -> None:
        """Activates the most recently used contexts, as many as fit."""
        self._faults += self._activation.preload()

    def fork_context(
        self, source: str, context_id: str, num_tokens: int | None = None, now: float = 0.0
    ) -> NamedContext:
        """Creates a context from the first `num_tokens` tokens of another, by default all. The two are then
        independent.

        Raises NotFound, AlreadyExists, InvalidArgument naming token_count, or Unavailable.
        """
        if self._requests.ingests_into(context_id):
            raise AlreadyExists(f"contexts/{context_id}")
        return self.contexts.fork(source, context_id, num_tokens, now)

    def delete_context(self, context_id: str) -> list[int]:
        """Deletes a context and cancels the ingests into it. Returns the ids of these ingests. Raises NotFound."""
        self.contexts.delete(context_id)
        self._lifecycle.mark_changed()
        return [
            request_id for request_id in self._requests.ingests_into(context_id) if self._lifecycle.cancel(request_id)
        ]

    @property
    def next_expiry(self) -> float | None:
        """Time of the next expiry of a context, including contexts that are still being ingested; None if none
        expires."""
        times = (self.contexts.next_expiry, self._requests.expiries.next)
        return min((time for time in times if time is not None), default=None)

    def expire_ingests(self, now: float) -> list[int]:
        """Cancels the ingests whose contexts would have expired at `now`, in seconds since the epoch. Returns their
        ids."""
        return [request_id for request_id in self._requests.expiries.passed(now) if self._lifecycle.cancel(request_id)]

    def audit(self) -> None:
        """Asserts the invariants of blocks, segments, references, reservations and jobs."""
        waiting, running = tuple(self._queue), tuple(self._running.values())
        audit_placements(self.segments, self.contexts, self._placer, self.recovery, (waiting, running))
        self.job_recovery.audit()
        audit_jobs(waiting, running, self._planner.under_way)
        self._deferral.audit()
        self._requests.audit()
        assert sorted(job.id for job in self._requests.jobs()) == sorted(job.id for job in (*waiting, *running))
