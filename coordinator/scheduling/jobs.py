"""Requests of clients, and the jobs that serve them. A job processes tokens into a segment that it owns."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from coordinator.engine_messages import DocumentPrompt, Failed, SchedulingParams
from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
from coordinator.kv_cache.contexts import NamedContext
from coordinator.kv_cache.positions import RopeSwitch
from coordinator.kv_cache.token_paths import TokenPath
from coordinator.scheduling.prefill_cursor import GrowingSegment, PrefillCursor
from longleaf.errors import LongleafError, NotFinite, Unavailable
from longleaf.positions import Rope
from longleaf.rank_protocol.step import Prefill, Work
from longleaf.types import TokenRange

SomeJob = TypeVar("SomeJob", bound="Job")


@dataclass(slots=True, eq=False)
class Request:
    """A client's request, from its admission to its end."""

    id: int
    """Ids increase: of two requests, the one with the smaller id is older."""
    scheduling: SchedulingParams
    origin: TokenPath
    """The path of the context, which its tokens continue."""
    ropes: RopeSwitch
    """The rotation of its tokens, the same as that of the path."""
    capacity: int
    """Maximum number of positions, for which the rope of the context was chosen."""
    is_beyond_trained: bool = False
    """Whether prompt and answer may extend beyond the positions that the model was trained for."""
    num_cached: int = field(init=False)
    """Number of cached tokens of the path and the prompt. If both ropes were needed, the smaller of the two numbers."""
    is_paused: bool = field(init=False, default=False)
    """Whether the reader is behind. No rows are computed until it has caught up."""
    jobs: list["Job"] = field(init=False, default_factory=list["Job"])
    """Its waiting and running jobs: a document, a prompt, or the samples of the answer that have not ended."""

    def __post_init__(self) -> None:
        self.num_cached = self.origin.end

    @property
    def start(self) -> int:
        """Position of the first of its tokens."""
        return self.origin.end

    @property
    def is_running(self) -> bool:
        """Whether any of its jobs runs."""
        return any(job.is_running for job in self.jobs)


class Phase(Enum):
    """The phase of a job. A preempted job is WAITING again."""

    WAITING = 0
    READING = 1
    """The prompt or document is processed in chunks."""
    ANSWERING = 2


class Job:
    """Processes the tokens of a document or a prompt. It has a tail while it runs."""

    noun = "prompt"
    """The name of the tokens in error messages."""

    def __init__(self, request: Request, job_id: int, prefill: PrefillCursor, num_blocks: BlockCount) -> None:
        self.request = request
        self.id = job_id
        self.prefill = prefill
        self.num_blocks = num_blocks
        """Upper bound of the blocks that the job holds at a time, excluding its path. It assumes that no token is
        cached, and also applies if the job is preempted."""
        self.phase = Phase.WAITING
        self.num_begins = 0
        self.last_turn = 0
        """The step that processed the last chunk, or after which the job began."""
        self.seconds_per_token: float | None = None
        """Seconds per token of the last chunk."""
        self.passed = frozenset[int]()
        """Ids of the jobs that this one overtook when it began, because they did not fit. They may preempt it."""
        self.is_spared = False
        """Whether the job began because of its age. A job of higher priority does not preempt it."""
        self.is_deferred = False
        """Whether the job waits until an older one has begun. Its reference to the path of its context is then that of
        an evicted context. See `Deferral`."""
        self._num_charged = 0
        self._tail: GrowingSegment | None = None

    @property
    def is_running(self) -> bool:
        return self.phase is not Phase.WAITING

    @property
    def tail(self) -> GrowingSegment:
        """The segment that the job grows while it runs."""
        assert self._tail is not None
        return self._tail

    @property
    def rope(self) -> Rope:
        """The rope of all its tokens, from when it begins to when it stops."""
        return self.request.ropes.at(self.request.start + len(self.prefill.token_ids))

    @property
    def num_tails(self) -> int:
        """Number of answers that the job generates at the same time, each in its segment."""
        return 0

    @property
    def context(self) -> str | None:
        """Id of the context that it queries or ingests into."""
        return None

    def uses(self, context: NamedContext) -> bool:
        """Whether the job queries a context, or ingests into it."""
        origin = self.request.origin
        return self.context == context.id and context.path.segments[: len(origin.segments)] == origin.segments

    @property
    def hidden(self) -> tuple[TokenRange, ...]:
        """Ranges of its path that its tokens do not attend to."""
        return ()

    @property
    def num_answer_left(self) -> int:
        """Maximum number of tokens that each of its answers may still have."""
        return 0

    @property
    def num_tokens_left(self) -> int:
        """Maximum number of tokens that the ranks may still have to compute."""
        prefill = self.prefill
        return len(prefill.token_ids) - prefill.num_computed + self.num_tails * self.num_answer_left

    def may_preempt(self, other: "Job") -> bool:
        """Whether this job may preempt `other`, a running job: if `other` is paused, if it overtook this job, or if it
        belongs to the same tenant, has a lower priority and is not spared."""
        if other.request.is_paused or self.id in other.passed:
            return True
        return self.request.scheduling.outranks(other.request.scheduling) and not other.is_spared

    @property
    def rank_as_victim(self) -> tuple[bool, int, int]:
        """Sort key for preemption within a tenant: the lowest is preempted first. See `as_victims`."""
        return not self.request.is_paused, self.request.scheduling.priority, -self.id

    def begin(self, tail: GrowingSegment, step: int) -> None:
        """Starts to grow `tail`, after step number `step`."""
        self.phase, self._tail = Phase.READING, tail
        self.num_begins += 1
        self.last_turn = step

    def record_start(self, passed: frozenset[int], *, is_spared: bool) -> int:
        """Records the jobs overtaken at the start. Returns the number of tokens that the client is charged for."""
        self.passed, self.is_spared = passed, is_spared
        self._num_charged = self.num_tokens_left
        return self._num_charged

    def refund(self) -> int:
        """Number of charged tokens that were not used, once the job has stopped."""
        unused, self._num_charged = min(self._num_charged, self.num_tokens_left), 0
        return unused

    def resume(self, tail: GrowingSegment) -> None:
        """Continues in `tail`, whose path contains all tokens processed so far."""
        self.prefill.path, self._tail = tail.segment.before, tail

    def stop(self) -> GrowingSegment:
        """Stops the job. Returns its former tail."""
        tail, self._tail = self.tail, None
        self.phase = Phase.WAITING
        return tail

    def next_chunk(self, placer: BlockPlacer, size: int, step: int) -> Prefill:
        """Places the next chunk, for step number `step`, and returns the work of the ranks."""
        tail, start = self.tail, self.tail.segment.end
        token_ids = self.prefill.next_chunk(size)
        pieces = tail.add_chunk(token_ids, placer)
        self.last_turn = step
        window_runs = tail.placement.window_runs
        return Prefill(tail.path_ids, start, token_ids, pieces, self.rope, window_runs, self.hidden)

    def roll_back(self, placer: BlockPlacer) -> None:
        """Returns to the last committed chunk: later plans are discarded."""
        if self.prefill.roll_back():
            self.tail.roll_back(self.tail.segment.start + self.prefill.num_computed, placer)

    def record_prefilled(self, num_tokens: int, seconds: float) -> None:
        """Records that a chunk has been processed."""
        self.prefill.num_computed += num_tokens
        self.seconds_per_token = seconds / num_tokens

    def failure(self, work: Work) -> Failed | LongleafError:
        """The outcome for the client when the results of a step are not finite."""
        return self.failed(NotFinite(self._tokens_of(work)))

    def poisoned(self, work: Work) -> Failed | LongleafError:
        """The outcome for the client when a step of the job broke two epochs."""
        return self.failed(Unavailable(f"{self._tokens_of(work)}: the ranks failed there repeatedly"))

    def failed(self, error: LongleafError) -> Failed | LongleafError:
        """The outcome for the client after an error."""
        return error

    def _tokens_of(self, work: Work) -> str:
        """The tokens of a step, numbered as in the client's request."""
        assert isinstance(work, Prefill)
        first = work.start - self.request.start
        return f"tokens {first} to {first + len(work.token_ids) - 1} of the {self.noun}"


def as_victims(jobs: Sequence[SomeJob]) -> list[SomeJob]:
    """Jobs in the order of preemption: paused ones first, then the youngest. The order by age selects tenants; each
    selected tenant loses its job with the lowest priority, so that high priorities do not exempt a tenant."""
    of_tenant = defaultdict[str, deque[SomeJob]](deque)
    for job in sorted(jobs, key=lambda job: job.rank_as_victim):
        of_tenant[job.request.scheduling.tenant].append(job)
    by_age = sorted(jobs, key=lambda job: (not job.request.is_paused, -job.id))
    return [of_tenant[job.request.scheduling.tenant].popleft() for job in by_age]


class IngestJob(Job):
    """The ingest of a document into a context."""

    noun = "document"

    def __init__(
        self, request: Request, document: DocumentPrompt, prefill: PrefillCursor, num_blocks: BlockCount
    ) -> None:
        super().__init__(request, request.id, prefill, num_blocks)
        self.document = document

    def begin(self, tail: GrowingSegment, step: int) -> None:
        super().begin(tail, step)
        tail.segment.text = self.document.text

    @property
    def context(self) -> str:
        return self.document.context
