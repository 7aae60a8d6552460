"""Jobs: what clients wait for. A job reads tokens into a segment of its own; a sequence then also answers."""

from array import array
from collections.abc import Sequence as TokenIds

from coordinator.events import Claim, Document, Failed, Prompt, Started
from coordinator.placement.blocks import Blocks, Placer, Reservation
from coordinator.placement.holdings import Holding
from coordinator.placement.paths import Path
from coordinator.placement.positions import UNLIMITED
from longleaf.channel.sequences import growth
from longleaf.channel.step import Comparison, Decode, Prefill, Row, Seen, Terms
from longleaf.errors import NotFinite
from longleaf.geometry import OWN_ROPE
from longleaf.runs import Run


class Job:
    """Tokens to read after a path of sealed segments. The first `num_prefill` of them go through chunks. Ids that come
    in an array are taken over, not copied: they may be many.

    `holding` and `reservation` are None while the job waits. `num_placed` counts the tokens that plans have given a
    place, `num_read` those whose keys and values exist: between the two lie the plans under way.
    """

    noun = "prompt"
    """What the tokens are to the client."""

    def __init__(self, job_id: int, path: Path, token_ids: TokenIds[int], num_prefill: int, claim: Claim) -> None:
        self.id = job_id
        """Ids grow: of two jobs the one with the smaller id is older."""
        self.owner = job_id
        """Id of the job that the client waits for: other samples of it have ids of their own."""
        self.origin = path
        """Where it began: the context's path."""
        self.path = path
        """What it reads after, `origin` or a path that goes on from there through segments of the prompt."""
        self.claim = claim
        self.start = path.end
        """Position of the first of token_ids."""
        self.token_ids = token_ids if isinstance(token_ids, array) else array("I", token_ids)
        self.num_prefill = num_prefill
        self.rope = OWN_ROPE
        """How the tokens are rotated: as those of the path."""
        self.capacity = UNLIMITED
        """Positions that the rope of a context was chosen for."""
        self.num_blocks = Blocks()
        """Blocks that the job takes at most at a time, without those of its path, if nothing else is held of its
        tokens, and even if it is preempted."""
        self.num_tails = 0
        """Answers that the job will have at a time, each in a segment of its own."""
        self.num_placed = 0
        self.num_read = 0
        self.num_begins = 0
        self.num_chunks = 0
        self.last_turn = 0
        """The step that read the last chunk, or after which the job began."""
        self.seconds_per_token: float | None = None
        """What the last chunk took."""
        self.passed = frozenset[int]()
        """Ids of the jobs that were before this one when it began, and had no room: it gives way to them."""
        self.num_charged = 0
        """Tokens that its client was charged with when it began."""
        self.is_spared = False
        """Began for its age, and is not preempted before it ends."""
        self.is_paused = False
        """Its reader is behind: no rows until it has caught up."""
        self.holding: Holding | None = None
        """Of the segment that the tokens are read into, or the answer."""
        self.reservation: Reservation | None = None
        self._path_ids: tuple[int, ...] = ()

    @property
    def num_answer_left(self) -> int:
        """Tokens that each of its answers may still have."""
        return 0

    @property
    def num_tokens_left(self) -> int:
        """Tokens that ranks may still have to compute."""
        return len(self.token_ids) - self.num_read + self.num_tails * self.num_answer_left

    def may_preempt(self, other: "Job") -> bool:
        """Whether a running job gives way to this one: if it does not read, came out of turn, or is less urgent."""
        if other.is_paused or self.id in other.passed:
            return True
        return other.claim.priority < self.claim.priority and not other.is_spared

    @property
    def rank_as_victim(self) -> tuple[bool, int, int]:
        """Whoever has the least one is preempted first."""
        return not self.is_paused, self.claim.priority, -self.id

    @property
    def has_chunks(self) -> bool:
        """There are prompt tokens that no plan has placed yet."""
        return self.num_placed < self.num_prefill

    def begin(self, holding: Holding, reservation: Reservation) -> None:
        self.holding, self.reservation = holding, reservation
        self._path_ids = holding.segment.path.ids

    def _active(self) -> tuple[Holding, Reservation]:
        assert self.holding is not None
        assert self.reservation is not None
        return self.holding, self.reservation

    def next_chunk(self, placer: Placer, chunk_size: int) -> Prefill:
        """Places the next chunk and says what the ranks must do."""
        holding, reservation = self._active()
        stop = min(self.num_placed + chunk_size, self.num_prefill)
        token_ids = tuple(self.token_ids[self.num_placed : stop])
        start = holding.segment.end
        end = start + len(token_ids)
        pieces = placer.place_chunk(start, end, self.num_chunks, reservation)
        holding.window_runs = placer.roll(holding.window_runs, start, end, reservation, is_chunk=True)
        holding.extend(token_ids, pieces)
        self.num_placed, self.num_chunks = stop, self.num_chunks + 1
        return Prefill(self._path_ids, start, token_ids, pieces, self.rope, holding.window_runs)

    def failure(self, work: Prefill | Decode) -> Failed | NotFinite:
        """What its client is told when what ranks computed in a step is not finite."""
        return NotFinite(self._tokens_of(work))

    def _tokens_of(self, work: Prefill | Decode) -> str:
        """The tokens of a step, as the client knows them."""
        assert isinstance(work, Prefill)
        first = work.start - self.start
        return f"tokens {first} to {first + len(work.token_ids) - 1} of the {self.noun}"

    def _grow(self, placer: Placer, token_ids: TokenIds[int]) -> tuple[Run, ...]:
        holding, reservation = self._active()
        last = holding.runs[-1] if holding.runs else None
        start = holding.segment.end
        runs = placer.grow(last, start, len(token_ids), reservation)
        end = start + len(token_ids)
        holding.window_runs = placer.roll(holding.window_runs, start, end, reservation, is_chunk=False)
        holding.extend(token_ids, runs)
        self.num_placed += len(token_ids)
        return runs


class Ingest(Job):
    """A document on its way into its context."""

    noun = "document"

    def __init__(self, job_id: int, path: Path, document: Document) -> None:
        super().__init__(job_id, path, document.token_ids, len(document.token_ids), document.claim)
        self.document = document


class Sequence(Job):
    """One live generation: at first, while the prompt is read, for all its samples, then for one of them.

    `num_asked` counts the tokens of the answer that plans have asked for, `generated` holds those that were sampled.
    """

    def __init__(self, job_id: int, path: Path, prompt: Prompt, num_prefill: int) -> None:
        super().__init__(job_id, path, prompt.token_ids, num_prefill, prompt.claim)
        self.prompt = prompt
        self.sampling = prompt.sampling
        self.end_tokens = frozenset[int]() if prompt.sampling.ignore_end_token else prompt.end_tokens
        self.num_tails = prompt.num_samples
        self.sample = 0
        self.num_cached = path.end
        """Tokens of the path and the prompt that were held before."""
        self.is_answering = False
        """The chunks are read, and the job stands for one sample alone."""
        self.num_asked = 0
        self.generated = array("I")
        self.comparison: Comparison | None = None
        self.is_beyond_trained = False
        """It may go beyond the positions that the model was trained for."""

    def started(self, queue_position: int = 0) -> Started:
        """What its client is told."""
        return Started(self.num_prompt, self.num_cached, queue_position, self.is_beyond_trained)

    def reuse(self, path: Path, num_prefill: int) -> None:
        """Goes on after `path`, which holds the beginning of a plain prompt."""
        assert self.start == 0
        self.path, self.num_prefill = path, num_prefill
        self.num_placed = self.num_read = path.end
        if not self.num_begins:
            self.num_cached = path.end

    def answer(self, holding: Holding) -> None:
        """Goes on in another segment, which continues the one that the prompt was read into."""
        assert self.reservation is not None
        self.path = holding.segment.before
        self.begin(holding, self.reservation)

    def fan_out(self, each: Blocks) -> list["Sequence"]:
        """The other samples, which share what was read. Their reservations, of `each`, are theirs; segments they
        lack."""
        assert self.reservation is not None
        num_tails, self.num_tails = self.num_tails, 1
        self.is_answering = True
        samples: list[Sequence] = []
        for i in range(1, num_tails):
            other = Sequence(self.id + i, self.path, self.prompt, self.num_prefill)
            other.owner, other.sample, other.num_tails, other.is_answering = self.id, i, 1, True
            other.origin, other.start, other.num_cached = self.origin, self.start, self.num_cached
            other.num_placed = other.num_read = self.num_read
            other.num_begins, other.is_spared, other.is_paused = 1, self.is_spared, self.is_paused
            other.passed = self.passed
            other.num_blocks, other.rope, other.capacity = self.num_blocks, self.rope, self.capacity
            other.sampling = self.sampling.of_sample(i)
            other.reservation = self.reservation.split(each)
            samples.append(other)
        return samples

    @property
    def is_sharing(self) -> bool:
        """Reads what is held of a prompt that begins alike, and is held for others itself."""
        return self.prompt.context is None and not self.prompt.is_compared

    @property
    def num_prompt(self) -> int:
        """Tokens of the context and the prompt."""
        return self.start + len(self.prompt.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.generated)

    def failure(self, work: Prefill | Decode) -> Failed | NotFinite:
        error = NotFinite(self._tokens_of(work))
        return Failed(error, self.sample) if self.num_tails == 1 else error  # the other samples go on

    def _tokens_of(self, work: Prefill | Decode) -> str:
        if isinstance(work, Prefill):
            is_read_again = work.start + len(work.token_ids) > self.num_prompt
            return super()._tokens_of(work) + (" and the answer" if is_read_again else "")
        answer = f"answer {self.sample}" if self.prompt.num_samples > 1 else "the answer"
        return f"token {self.num_generated} of {answer}"

    @property
    def num_answer_left(self) -> int:
        return self.sampling.max_tokens - self.num_generated

    @property
    def can_end_early(self) -> bool:
        """Something other than the length may end the answer."""
        return bool(self.end_tokens or self.sampling.stop or self.sampling.stop_tokens)

    @property
    def speaks_for_all(self) -> bool:
        """Where it stands is where the whole request stands: it is not one sample of several."""
        return self.num_tails == self.prompt.num_samples

    @property
    def has_rows(self) -> bool:
        """There are tokens of the answer that no plan has asked for yet."""
        return self.is_answering and not self.is_paused and self.num_asked < self.sampling.max_tokens

    def preempt(self) -> None:
        """Goes back to where nothing is read: what was generated is read again with the prompt, later, and the answer
        goes on at its next token. That is the same one as without: randomness depends on the token's index alone."""
        self.token_ids = array("I", self.prompt.token_ids) + self.generated
        self.path, self.num_placed, self.num_read, self.num_chunks = self.origin, 0, 0, 0
        self.num_asked, self.is_answering = self.num_generated, False
        self.holding = self.reservation = None

    def next_row(self, placer: Placer) -> Row:
        """Places the tokens of the next step: the rest of the prompt, or the token that was sampled last.

        That one may still be unknown here, for the plan that samples it may be under way: `take` tells its id.
        """
        holding, _ = self._active()
        start, index, known = holding.segment.end, self.num_asked, holding.window_runs
        sent = tuple(self.token_ids[self.num_placed :])  # empty, once the prompt is placed
        terms = self._terms() if sent else None
        runs = self._grow(placer, sent or (self.generated[-1] if index == self.num_generated else 0,))
        self.num_asked += 1
        window_runs, num_reference = holding.window_runs, self._num_reference
        if terms is not None:
            return Row(self.id, self._path_ids, start, sent, runs, index, terms, num_reference, self.rope, window_runs)
        window_runs = window_runs and growth(known, window_runs, placer.block_size)
        return Row(self.id, (), start, (), runs, index, None, num_reference, OWN_ROPE, window_runs)

    def _terms(self) -> Terms:
        """What rank 0 must know before the first row; others would only have to read it."""
        reference = tuple(self.token_ids) if self.prompt.is_compared else ()
        return Terms(self.sampling.choosing, self._seen(), reference)

    @property
    def _num_reference(self) -> int:
        """Tokens to compute once more when the last one of the answer has been asked for."""
        is_complete = self.num_asked == self.sampling.max_tokens
        return self.num_prompt + self.num_asked - 1 if self.prompt.is_compared and is_complete else 0

    def take(self, token_id: int) -> None:
        """Adds the token that was sampled next to the answer."""
        segment = self._active()[0].segment
        self.num_read = len(self.token_ids)
        self.generated.append(token_id)
        if (position := self.num_prompt + self.num_generated - 1) < segment.end:
            segment.fill(position, token_id)

    def _seen(self) -> Seen | None:
        """What rank 0 cannot know of the tokens that penalties count."""
        if not self.sampling.has_penalties:
            return None
        generated = tuple(self.generated)
        if self.sampling.repetition_penalty == 1.0:
            return Seen((), generated)
        return Seen(tuple({*self.path.token_ids(), *self.prompt.token_ids}), generated)
