"""Admission: converts requests to jobs, or refuses them with the reason."""

from array import array
from collections.abc import Callable, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from coordinator.engine_messages import STATES_HIDE_NOTHING, DocumentPrompt, Prompt, SchedulingParams
from coordinator.kv_cache.block_placer import BlockCount
from coordinator.kv_cache.contexts import ContextTable, NamedContext
from coordinator.kv_cache.positions import UNLIMITED, RopeSwitch
from coordinator.kv_cache.segments import SegmentStore
from coordinator.kv_cache.token_paths import Segment, TokenPath
from coordinator.scheduling.jobs import IngestJob, Job, Request
from coordinator.scheduling.limits import MAX_TOKENS, JobLimits, num_fed
from coordinator.scheduling.prefill_cursor import PrefillCursor
from coordinator.scheduling.requests import Requests
from coordinator.scheduling.sequences import SequenceJob
from coordinator.scheduling.throughput import Speeds
from longleaf.config import EngineConfig
from longleaf.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from longleaf.formatting import human_seconds


class Admission:
    """Checks requests. It is stateless."""

    def __init__(
        self,
        config: EngineConfig,
        limits: JobLimits,
        contexts: ContextTable,
        segments: SegmentStore,
        requests: Requests,
        speeds: Speeds,
        *,
        can_evict: bool = False,
    ) -> None:
        self._config = config
        self._limits = limits
        self._contexts = contexts
        self._segments = segments
        self._requests = requests
        self._speeds = speeds
        self._can_evict = can_evict
        """Idle contexts can be evicted to make room."""

    def admit(
        self, request_id: int, prompt: Prompt | DocumentPrompt, now: float, begin_waiting: Callable[[], None]
    ) -> Job:
        """The job of a request, which may have to wait in the queue. `begin_waiting` starts queued jobs for which there
        is room.

        Raises AlreadyExists, NotFound, InvalidArgument, DeadlineExceeded when the deadline cannot be met, Unavailable
        when it could be met after the recovery, or ResourceExhausted when the queue is full (resumed answers are
        exempt) or there may never be room.
        """
        job = self._sequence(request_id, prompt) if isinstance(prompt, Prompt) else self._ingest(request_id, prompt)
        goes_on = isinstance(prompt, Prompt) and prompt.generated is not None
        if self._failure_in_queue(prompt.scheduling):
            begin_waiting()  # those jobs wait only for the next step
        if not goes_on and (failure := self._failure_in_queue(prompt.scheduling)):
            raise ResourceExhausted("queue", failure, self._speeds.retry_seconds(self._requests.in_line().total()))
        jobs = list(self._requests.jobs())
        self._check_room(job, jobs)
        is_probe = isinstance(prompt, Prompt) and prompt.is_probe  # its answer was sent already
        if job.request.scheduling.deadline is not None and not is_probe:
            self._check_time(job, jobs, job.request.scheduling.deadline - now)
        return job

    def _failure_in_queue(self, scheduling: SchedulingParams) -> str:
        """The reason why a request cannot be queued; empty if it can. Where there are several tenants, each may fill
        half of the queue, so that there is space for the others."""
        in_line, most = self._requests.in_line(), self._config.max_waiting
        if in_line.total() >= most:
            return f"{most:,} requests are waiting, which is the limit"
        share = (most + 1) // 2
        if not scheduling.is_alone and in_line[scheduling.tenant] >= share:
            return f"tenant {scheduling.tenant} has {share:,} waiting requests, its share of {most:,}"
        return ""

    def _sequence(self, request_id: int, prompt: Prompt) -> SequenceJob:
        prompt.sampling.check()
        if not 1 <= prompt.num_samples <= self._config.max_sequences:
            limit = f"between 1 and {self._config.max_sequences}, the limit of concurrent generations"
            raise InvalidArgument("sample_count", f"{prompt.num_samples} is not {limit}")
        context = self._contexts.get(prompt.context) if prompt.context is not None else None
        if not prompt.token_ids:
            raise InvalidArgument("input", "has no tokens")
        max_tokens, path = prompt.max_tokens, self._origin(prompt, context)
        num_positions = path.end + len(prompt.token_ids) + num_fed(max_tokens)
        ropes, capacity = self._limits.positions.ropes(num_positions), UNLIMITED
        if context is not None:
            ropes, capacity = RopeSwitch(context.rope, context.rope), context.capacity
            if (others := self._other_ropes(prompt, context, num_positions)) is not None:
                ropes, capacity, path = others, UNLIMITED, TokenPath()
                token_ids = context.path.token_ids() + array("I", prompt.token_ids)
                prompt = replace(prompt, context=None, token_ids=token_ids)
        request = Request(
            id=request_id,
            scheduling=prompt.scheduling,
            origin=path,
            ropes=ropes,
            capacity=capacity,
            is_beyond_trained=num_positions > self._limits.positions.trained,
        )
        num_tokens = len(prompt.token_ids)
        num_prefill = self._limits.num_prefill(num_tokens, prompt.num_samples, prompt.num_rows)
        prefill = PrefillCursor(path, _array(prompt.token_ids), num_prefill)
        self._limits.check(prefill, request.capacity, "input", 0)
        self._limits.check(prefill, request.capacity, MAX_TOKENS, max_tokens)
        blocks = self._limits.check(prefill, request.capacity, "sample_count", max_tokens, prompt.num_samples)
        return SequenceJob(request, prompt, prefill, blocks, range(prompt.num_samples))

    def _other_ropes(self, prompt: Prompt, context: NamedContext, num_positions: int) -> RopeSwitch | None:
        """The ropes of a question that needs keys of another scaling than those of its context, now or once the answer
        is longer. Such a question becomes a prompt of all tokens, which reuses the cached keys with the right scaling.
        None where the question uses the context's keys."""
        ropes = self._limits.positions.question_ropes(context.rope, context.capacity, num_positions)
        needed = {ropes.at(context.num_tokens + len(prompt.token_ids)), ropes.at(num_positions)}
        return ropes if prompt.is_whole and needed != {context.rope} else None

    def _origin(self, prompt: Prompt, context: NamedContext | None) -> TokenPath:
        """The path that a prompt continues. Raises NotFound where the context has been replaced since, and
        InvalidArgument where it lacks tokens to be hidden."""
        path, beginning = context.path if context else TokenPath(), prompt.beginning
        if context is not None and beginning is not None:
            is_there = path.end >= beginning.end and path.cut(beginning.end).ids == beginning.segments
            # the windows at the end of a document are restored even if none are held now
            is_seam = beginning.end in context.ends
            if not is_there or not (
                is_seam or self._segments.placements.seams(path, beginning.end)[0] == beginning.end
            ):
                raise NotFound(f"contexts/{prompt.context}")
            path = path.cut(beginning.end)
        windows = self._segments.placements.windows
        for i, (start, end) in enumerate(prompt.hidden):
            if windows is not None and windows.is_state:
                raise InvalidArgument(f"hidden[{i}]", STATES_HIDE_NOTHING)
            if end > path.end:
                message = f"tokens {start:,} to {end:,} are not in the context, which has {path.end:,}"
                raise InvalidArgument(f"hidden[{i}]", message)
        return path

    def _ingest(self, request_id: int, document: DocumentPrompt) -> IngestJob:
        context, token_ids = document.context, document.token_ids
        is_busy = bool(self._requests.ingests_into(context))
        if not document.append and (is_busy or context in self._contexts):
            raise AlreadyExists(f"contexts/{context}")
        known = self._contexts.get(context) if document.append else None
        if not token_ids:
            raise InvalidArgument("text", "has no tokens")
        if is_busy:
            seconds = self._speeds.retry_seconds(1)
            raise ResourceExhausted(
                f"contexts/{context}", "another document is being appended; retry when that ends", seconds
            )
        declared = None if document.settings.capacity is UNSET else document.settings.capacity
        positions, path = self._limits.positions, known.path if known else TokenPath()
        capacity = known.capacity if known else positions.capacity(len(token_ids), declared)
        rope = known.rope if known else positions.rope(capacity)
        prefill = PrefillCursor(path, _array(token_ids), len(token_ids))
        blocks = self._limits.check(prefill, capacity, "text", 0, num_tails=0)
        request = Request(request_id, document.scheduling, path, RopeSwitch(rope, rope), capacity)
        return IngestJob(request, document, prefill, blocks)

    def _check_room(self, job: Job, jobs: list[Job]) -> None:
        """Raises ResourceExhausted unless the job, and each of `jobs`, can begin once nothing else runs.

        The order of arrival does not matter, because any queued job may become the first one.

        A document must leave room for each waiting answer, because it is not preempted, and its context may stay. So
        must a pinned context. Other questions need not: their contexts are resident already or, if contexts can be
        evicted, questions are deferred for an older job that needs the space. See `Deferral`.

        The contexts of all answers must fit beside the job, because all of them may have to be recomputed after the
        loss of a rank. So a prompt that has no room beside contexts in use is refused with a retry delay.
        """
        retained, stays = self.resident(job, jobs)
        stays += self._limits.num_scratch()
        answers = [other for other in jobs if isinstance(other, SequenceJob)]
        path_segments = {s.id: s for path in self._requested(answers) for s in path.segments if s.id not in retained}
        self._limits.check_room(job.num_blocks, stays, None)
        placements = self._segments.placements.for_segments(path_segments.values())
        resident = stays + self._limits.wanted(placements)
        resident += sum((one.num_evicted for one in placements if one.is_evicted), BlockCount())  # of deferred jobs
        needs = [other.num_blocks for other in answers]
        most = BlockCount(max((n.sharded for n in needs), default=0), max((n.windows for n in needs), default=0))
        retry_seconds, context = self._speeds.retry_seconds(len(jobs)), self._contexts.find(job.context)
        if isinstance(job, IngestJob):
            resident += most
        elif self._can_evict and context is not None and context.record.is_pinned:
            self._limits.check_room(most, stays, retry_seconds)
        self._limits.check_room(job.num_blocks, resident, retry_seconds)

    def resident(self, job: Job, jobs: list[Job]) -> tuple[dict[int, Segment], BlockCount]:
        """The segments, by id, that are not freed when the answers among `jobs` end, and so limit the room of `job`.
        Also the blocks of these segments and all documents among `jobs`, without those for recomputation."""
        retained = self._durable([job, *jobs])
        coming = sum((other.num_blocks for other in jobs if isinstance(other, IngestJob)), BlockCount())
        resident = self._limits.wanted(self._segments.placements.for_segments(retained.values()))
        return retained, resident + coming

    def _requested(self, answers: list[SequenceJob]) -> list[TokenPath]:
        """The paths that are held while these answers run."""
        bound = self._contexts.bound({answer.context for answer in answers}) if self._can_evict else []
        return [*(answer.request.origin for answer in answers), *(context.path for context in bound)]

    def _durable(self, jobs: list[Job]) -> dict[int, Segment]:
        """The segments that are not freed when answers end: those of all contexts or, if contexts can be evicted, those
        that the first of `jobs` and all documents need."""
        contexts = self._contexts.list()
        if not self._can_evict:
            return {s.id: s for context in contexts for s in context.path.segments}
        durable_jobs = [job for i, job in enumerate(jobs) if i == 0 or isinstance(job, IngestJob)]
        origins = [job.request.origin for job in durable_jobs]
        origins += [context.path for context in self._contexts.bound({job.context for job in durable_jobs})]
        return {s.id: s for path in origins for s in path.segments}

    def _check_time(self, job: Job, jobs: list[Job], left: float) -> None:
        """Raises DeadlineExceeded when the job needs more than `left` seconds, or Unavailable when that is only due to
        tokens that must be recomputed."""
        needed = self._speeds.least_seconds(job, self._num_resident(job), jobs)
        num_lost = self._segments.placements.num_lost(job.request.origin)
        lost_seconds = self._speeds.read_seconds(num_lost)
        if 0 < left and needed <= left < needed + lost_seconds:
            message = f"{num_lost:,} tokens are not in memory and must be recomputed"
            raise Unavailable(f"{message}; {human_seconds(left)} are left", lost_seconds)
        if left <= 0 or needed > left:
            raise DeadlineExceeded(
                f"{human_seconds(max(0.0, left))} are left, and at least {human_seconds(needed)} are needed"
            )

    def _num_resident(self, job: Job) -> int:
        """Number of tokens that the prefix cache has."""
        if not (isinstance(job, SequenceJob) and job.is_sharing):
            return 0
        origin, tenant = job.request.origin, job.request.scheduling.tenant
        return self._segments.match(job.prefill.token_ids[:-1], job.rope, tenant, origin).end - origin.end


def _array(token_ids: Sequence[int]) -> "array[int]":
    """Returns an array without a copy, because there may be many ids."""
    return token_ids if isinstance(token_ids, array) else array("I", token_ids)
