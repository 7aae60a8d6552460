"""Requests, which clients wait for, and the jobs that do them: a job reads tokens into a segment of its own."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from coordinator.engine_messages import DocumentPrompt, Failed, SchedulingClaim
from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer
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
    """What a client asked for, from its admission to its end."""

    id: int
    """Ids grow: of two requests the one with the smaller id is older."""
    claim: SchedulingClaim
    origin: TokenPath
    """Where its tokens begin: the context's path."""
    ropes: RopeSwitch
    """How they are rotated: as those of the path."""
    capacity: int
    """Positions that the rope of a context was chosen for."""
    is_beyond_trained: bool = False
    """Prompt and answer may go beyond the positions that the model was trained for."""
    num_cached: int = field(init=False)
    """Tokens of the path and the prompt that were held before; the fewest, if they were needed with both ropes."""
    is_paused: bool = field(init=False, default=False)
    """The reader is behind: no rows until it has caught up."""
    jobs: list["Job"] = field(init=False, default_factory=list["Job"])
    """What of it waits or runs: a document, a prompt, or the samples of the answer that have not ended."""

    def __post_init__(self) -> None:
        self.num_cached = self.origin.end

    @property
    def start(self) -> int:
        """Position of the first of its tokens."""
        return self.origin.end

    @property
    def is_running(self) -> bool:
        """Whether any of its jobs does."""
        return any(job.is_running for job in self.jobs)


class Phase(Enum):
    """Where a job stands. A preempted one waits again."""

    WAITING = 0
    READING = 1
    """In chunks."""
    ANSWERING = 2


class Job:
    """Reads tokens for a request: a document or a prompt. It has a tail while it runs."""

    noun = "prompt"
    """What the tokens are to the client."""

    def __init__(self, request: Request, job_id: int, reading: PrefillCursor, num_blocks: BlockCount) -> None:
        self.request = request
        self.id = job_id
        self.reading = reading
        self.num_blocks = num_blocks
        """Blocks that the job takes at most at a time, without those of its path, if nothing else is held of its
        tokens, and even if it is preempted."""
        self.phase = Phase.WAITING
        self.num_begins = 0
        self.last_turn = 0
        """The step that read the last chunk, or after which the job began."""
        self.seconds_per_token: float | None = None
        """What the last chunk took."""
        self.passed = frozenset[int]()
        """Ids of the jobs that were before this one when it began, and had no room: it gives way to them."""
        self.is_spared = False
        """Began for its age, and is not preempted before it ends."""
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
        """How all that the job reads and answers is rotated, from when it begins to when it stops."""
        return self.request.ropes.at(self.request.start + len(self.reading.token_ids))

    @property
    def num_tails(self) -> int:
        """Answers that the job will have at a time, each in a segment of its own."""
        return 0

    @property
    def context(self) -> str | None:
        """Id of the context that it asks, or reads into."""
        return None

    @property
    def hidden(self) -> tuple[TokenRange, ...]:
        """What of its path it does not read."""
        return ()

    @property
    def num_answer_left(self) -> int:
        """Tokens that each of its answers may still have."""
        return 0

    @property
    def num_tokens_left(self) -> int:
        """Tokens that ranks may still have to compute."""
        reading = self.reading
        return len(reading.token_ids) - reading.num_read + self.num_tails * self.num_answer_left

    def may_preempt(self, other: "Job") -> bool:
        """Whether a running job gives way to this one: if it does not read, came out of turn, or is one of the same
        tenant that is less urgent."""
        if other.request.is_paused or self.id in other.passed:
            return True
        return self.request.claim.outranks(other.request.claim) and not other.is_spared

    @property
    def rank_as_victim(self) -> tuple[bool, int, int]:
        """Whoever of a tenant has the least one gives way first: see `as_victims`."""
        return not self.request.is_paused, self.request.claim.priority, -self.id

    def begin(self, tail: GrowingSegment, step: int) -> None:
        """Reads into `tail` from now on, which is after step number `step`."""
        self.phase, self._tail = Phase.READING, tail
        self.num_begins += 1
        self.last_turn = step

    def take_turn(self, passed: frozenset[int], *, is_spared: bool) -> int:
        """Notes how it came to begin; gives the tokens that its client is charged with."""
        self.passed, self.is_spared = passed, is_spared
        self._num_charged = self.num_tokens_left
        return self._num_charged

    def refund(self) -> int:
        """Tokens that its client was charged with and it did not use, once it has stopped."""
        unused, self._num_charged = min(self._num_charged, self.num_tokens_left), 0
        return unused

    def go_on(self, tail: GrowingSegment) -> None:
        """Goes on in `tail`, with what was read before on its path."""
        self.reading.path, self._tail = tail.segment.before, tail

    def stop(self) -> GrowingSegment:
        """Neither reads nor answers from now on; gives up its tail."""
        tail, self._tail = self.tail, None
        self.phase = Phase.WAITING
        return tail

    def next_chunk(self, placer: BlockPlacer, size: int, step: int) -> Prefill:
        """Places the next chunk, which step number `step` reads, and says what the ranks must do."""
        tail, start = self.tail, self.tail.segment.end
        token_ids = self.reading.next_chunk(size)
        pieces = tail.add_chunk(token_ids, placer)
        self.last_turn = step
        window_runs = tail.holding.window_runs
        return Prefill(tail.path_ids, start, token_ids, pieces, self.rope, window_runs, self.hidden)

    def roll_back(self, placer: BlockPlacer) -> None:
        """Goes back to the last chunk that was read: plans that came later never were."""
        if self.reading.roll_back():
            self.tail.roll_back(self.tail.segment.start + self.reading.num_read, placer)

    def read(self, num_tokens: int, seconds: float) -> None:
        """A chunk has been read."""
        self.reading.num_read += num_tokens
        self.seconds_per_token = seconds / num_tokens

    def failure(self, work: Work) -> Failed | LongleafError:
        """What its client is told when what ranks computed in a step is not finite."""
        return self.failed(NotFinite(self._tokens_of(work)))

    def poisoned(self, work: Work) -> Failed | LongleafError:
        """What its client is told when the ranks broke in a step of it, and once more when they tried it again."""
        return self.failed(Unavailable(f"{self._tokens_of(work)}: the ranks broke there, again and again"))

    def failed(self, error: LongleafError) -> Failed | LongleafError:
        """What its client is told of an error."""
        return error

    def _tokens_of(self, work: Work) -> str:
        """The tokens of a step, as the client knows them."""
        assert isinstance(work, Prefill)
        first = work.start - self.request.start
        return f"tokens {first} to {first + len(work.token_ids) - 1} of the {self.noun}"


def as_victims(jobs: Sequence[SomeJob]) -> list[SomeJob]:
    """Jobs as they give way: those that are not read first, then the youngest. The tenant whose turn that makes it
    gives up its lowest: so no priority of its own spares it the turn."""
    of_tenant = defaultdict[str, deque[SomeJob]](deque)
    for job in sorted(jobs, key=lambda job: job.rank_as_victim):
        of_tenant[job.request.claim.tenant].append(job)
    by_age = sorted(jobs, key=lambda job: (not job.request.is_paused, -job.id))
    return [of_tenant[job.request.claim.tenant].popleft() for job in by_age]


class IngestJob(Job):
    """A document on its way into its context."""

    noun = "document"

    def __init__(
        self, request: Request, document: DocumentPrompt, reading: PrefillCursor, num_blocks: BlockCount
    ) -> None:
        super().__init__(request, request.id, reading, num_blocks)
        self.document = document

    def begin(self, tail: GrowingSegment, step: int) -> None:
        super().begin(tail, step)
        tail.segment.text = self.document.text

    @property
    def context(self) -> str:
        return self.document.context
