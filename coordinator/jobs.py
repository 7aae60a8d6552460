"""Jobs: what clients wait for. A job reads tokens into a segment of its own; a sequence then also answers."""

from array import array
from collections.abc import Sequence as TokenIds

import msgspec

from coordinator.blocks import Placer, Reservation
from coordinator.contexts import Segment
from coordinator.events import Prompt
from longleaf.runs import Run
from longleaf.step import Prefill, Row


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a job may claim against others: as in events.Prompt."""

    priority: int = 0
    client: str = ""
    deadline: float | None = None


NO_CLAIM = Claim()


class Job:
    """Tokens to read after a path of sealed segments. The first `num_prefill` of them go through chunks.

    `segment` and `reservation` are None while the job waits. `num_placed` counts the tokens that plans have given a
    place, `num_read` those whose keys and values exist: between the two lie the plans under way.
    """

    def __init__(
        self, job_id: int, path: tuple[Segment, ...], token_ids: TokenIds[int], num_prefill: int, claim: Claim
    ) -> None:
        self.id = job_id
        """Ids grow: of two jobs the one with the smaller id is older."""
        self.path = path
        self.claim = claim
        self.token_ids = array("I", token_ids)
        self.num_prefill = num_prefill
        self.num_blocks = 0
        """Blocks that the job takes by its end, without those of its path."""
        self.num_placed = 0
        self.num_read = 0
        self.num_begins = 0
        self.num_chunks = 0
        self.last_turn = 0
        """The step that read the last chunk, or after which the job began."""
        self.seconds_per_token: float | None = None
        """What the last chunk took."""
        self.num_passed = 0
        """Jobs that began before this one though it was next."""
        self.num_charged = 0
        """Tokens that its client was charged with when it began."""
        self.is_spared = False
        """Began for its age, and is not preempted before it ends."""
        self.is_paused = False
        """Its reader is behind: no rows until it has caught up."""
        self.segment: Segment | None = None
        self.reservation: Reservation | None = None
        self._path_ids: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.path[-1].end if self.path else 0

    @property
    def num_tokens_left(self) -> int:
        """Tokens that ranks may still have to compute."""
        return len(self.token_ids) - self.num_read

    def may_preempt(self, other: "Job") -> bool:
        return other.is_paused or (other.claim.priority < self.claim.priority and not other.is_spared)

    @property
    def rank_as_victim(self) -> tuple[bool, int, int]:
        """Whoever has the least one is preempted first."""
        return not self.is_paused, self.claim.priority, -self.id

    @property
    def has_chunks(self) -> bool:
        """There are prompt tokens that no plan has placed yet."""
        return self.num_placed < self.num_prefill

    def begin(self, segment: Segment, reservation: Reservation) -> None:
        self.num_begins += 1
        self.segment, self.reservation = segment, reservation
        self._path_ids = (*(s.id for s in self.path), segment.id)

    def _active(self) -> tuple[Segment, Reservation]:
        assert self.segment is not None
        assert self.reservation is not None
        return self.segment, self.reservation

    def next_chunk(self, placer: Placer, chunk_size: int) -> Prefill:
        """Places the next chunk and says what the ranks must do."""
        segment, reservation = self._active()
        stop = min(self.num_placed + chunk_size, self.num_prefill)
        token_ids = tuple(self.token_ids[self.num_placed : stop])
        start = segment.end
        pieces = placer.place_chunk(start, start + len(token_ids), self.num_chunks, reservation)
        segment.extend(token_ids, pieces)
        self.num_placed, self.num_chunks = stop, self.num_chunks + 1
        return Prefill(self._path_ids, start, token_ids, pieces)

    def _grow(self, placer: Placer, token_ids: TokenIds[int]) -> tuple[Run, ...]:
        segment, reservation = self._active()
        last = segment.runs[-1] if segment.runs else None
        runs = placer.grow(last, segment.end, len(token_ids), reservation)
        segment.extend(token_ids, runs)
        self.num_placed += len(token_ids)
        return runs


class Ingest(Job):
    """A document on its way into context `context`."""

    def __init__(
        self, job_id: int, path: tuple[Segment, ...], token_ids: TokenIds[int], context: str, claim: Claim
    ) -> None:
        super().__init__(job_id, path, token_ids, len(token_ids), claim)
        self.context = context


class Sequence(Job):
    """One live generation. `num_asked` counts the tokens of the answer that plans have asked for, `generated` holds
    those that were sampled by now."""

    def __init__(self, job_id: int, path: tuple[Segment, ...], prompt: Prompt, num_prefill: int) -> None:
        claim = Claim(priority=prompt.priority, client=prompt.client, deadline=prompt.deadline)
        super().__init__(job_id, path, prompt.token_ids, num_prefill, claim)
        self.num_prompt = self.start + len(self.token_ids)
        """Tokens of the path and the prompt."""
        self.sampling = prompt.sampling
        self.end_tokens = frozenset[int]() if prompt.sampling.ignore_end_token else prompt.end_tokens
        self.num_asked = 0
        self.generated = array("I")

    @property
    def num_generated(self) -> int:
        return len(self.generated)

    @property
    def num_tokens_left(self) -> int:
        return super().num_tokens_left + self.sampling.max_tokens - self.num_generated

    @property
    def can_end_early(self) -> bool:
        """Something other than the length may end the answer."""
        return bool(self.end_tokens or self.sampling.stop)

    @property
    def has_rows(self) -> bool:
        """The chunks are placed, and there are tokens of the answer that no plan has asked for yet."""
        return not (self.has_chunks or self.is_paused) and self.num_asked < self.sampling.max_tokens

    def preempt(self) -> None:
        """Goes back to where nothing is read: what was generated is read again with the prompt, later, and the answer
        goes on at its next token. That is the same one as without: randomness depends on the token's index alone."""
        self.token_ids = self.token_ids[: self.num_prompt - self.start] + self.generated
        self.num_placed = self.num_read = self.num_chunks = 0
        self.num_asked = self.num_generated
        self.segment = self.reservation = None

    def next_row(self, placer: Placer) -> Row:
        """Places the tokens of the next step: the rest of the prompt, or the token that was sampled last.

        That one may still be unknown here, for the plan that samples it may be under way: `take` tells its id.
        """
        segment, _ = self._active()
        start, index = segment.end, self.num_asked
        sent = tuple(self.token_ids[self.num_placed :])  # empty, once the prompt is placed
        runs = self._grow(placer, sent or (self.generated[-1] if index == self.num_generated else 0,))
        self.num_asked += 1
        return Row(self.id, self._path_ids, start, sent, runs, self.sampling, index)

    def take(self, token_id: int) -> None:
        """Adds the token that was sampled next to the answer."""
        segment, _ = self._active()
        self.num_read = len(self.token_ids)
        self.generated.append(token_id)
        if (position := self.num_prompt + self.num_generated - 1) < segment.end:
            segment.fill(position, token_id)
