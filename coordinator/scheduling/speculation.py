"""What the sequences of a step draft, and when it pays to wait for that. Pure: measured times are passed in."""

from collections.abc import Sequence as Several
from weakref import WeakKeyDictionary

from coordinator.kv_cache.token_paths import Segment
from coordinator.scheduling.sequences import Sequence
from coordinator.speculation.acceptance import USUAL_DECAY, Acceptance
from coordinator.speculation.draft_length import DraftLengthPolicy
from coordinator.speculation.ngram_drafter import NO_DRAFT, Draft, NgramIndexes
from coordinator.speculation.sequence_drafter import SequenceDrafter
from coordinator.speculation.step_cost_model import StepCostModel
from longleaf.rank_protocol.step import Decode, Row, StepPlan
from longleaf.sampling import Token

ENTERED_AT_ONCE = 8192
"""Tokens of a path that are entered between two steps, if they were not when they were read."""
MAX_COMPARED = 4
"""Sequences of a step without drafts that are compared with what came: each may look for a draft."""
TURN_STEPS = 64
"""Steps for which those are the same; then it is the turn of the next ones."""


class Drafter:
    """Drafts for whole steps. Sequences keep what is known of them in `guesses`."""

    def __init__(self, max_rows: int, max_drafts: int, block_size: int) -> None:
        """Steps have `max_rows` rows at most, and sequences `max_drafts` drafts; 0: none has any."""
        self._max_drafts = max_drafts
        self._block_size = block_size
        self._indexes = NgramIndexes()
        self._usual = WeakKeyDictionary[Segment, Acceptance]()
        """By the first segment of contexts."""
        self._costs = StepCostModel()
        self._policy = DraftLengthPolicy(max_rows, max_drafts, self._costs)
        self._read = dict[Segment, int]()
        """Segments that have grown, up to these positions."""
        self._measured = list[tuple[StepPlan, float]]()
        """Steps, and how long they took."""
        self._came = list[tuple[Sequence, int, int]]()
        """Tokens that came without drafts, and the position behind each."""
        self._num_learned = 0
        """Times that some of these were compared."""

    def waits(self, jobs: Several[Sequence]) -> bool:
        """Whether the next step of these is to have drafts, for which the result of the one before must be there."""
        if not (self._max_drafts and self._policy.has_room(len(jobs))):
            return False
        drafts = map(self._guesses_of, jobs)  # of one that begins, too: others may have asked the same context
        return self._policy.is_worth_waiting([each.acceptance.expected() if each else [] for each in drafts])

    def draft(self, jobs: Several[Sequence], rows: Several[Row]) -> tuple[Row, ...]:
        """The rows with drafts, where they pay; nothing else of these sequences is under way."""
        if not (self._max_drafts and self._policy.has_room(len(jobs))):
            return tuple(rows)
        drafts = [NO_DRAFT if row.terms else self._look(job) for job, row in zip(jobs, rows, strict=True)]
        lengths = self._policy.lengths([_chances(job, draft) for job, draft in zip(jobs, drafts, strict=True)])
        return tuple(map(_with_draft, jobs, rows, drafts, lengths))

    def _look(self, job: Sequence) -> Draft:
        """What may follow the token that was placed just now."""
        most = min(self._max_drafts, job.most_drafts(self._block_size))
        drafts = self._guesses_of(job) if most > 0 else None
        return drafts.draft(job.tail.segment.end, most) if drafts else NO_DRAFT

    def _guesses_of(self, job: Sequence) -> SequenceDrafter | None:
        if not (self._max_drafts and job.may_draft):
            return None
        if job.guesses is None:
            job.guesses = SequenceDrafter(job.tail.segment, self._indexes, self._max_drafts, self._usual_of(job))
        job.guesses.follow(job.tail.segment)
        return job.guesses

    def _usual_of(self, job: Sequence) -> Acceptance | None:
        """What became of the drafts of those that asked the same context: the questions of one are alike."""
        if not (segments := job.request.origin.segments):
            return None
        return self._usual.setdefault(segments[0], Acceptance(self._max_drafts, decay=USUAL_DECAY))

    # --- what came of it ---

    def measure(self, plan: StepPlan, seconds: float) -> None:
        """A step of ranks took so long: `learn` takes it in."""
        self._measured.append((plan, seconds))

    def measure_gap(self, seconds: float, *, is_ahead: bool) -> None:
        """Takes in the time between two decode steps, the second sent before the first was over (`is_ahead`), or
        after."""
        self._costs.measure_gap(seconds, is_ahead=is_ahead)

    def read(self, segment: Segment, end: int) -> None:
        """Tokens of a segment before position `end` were read: `learn` enters them."""
        if self._max_drafts:
            self._read[segment] = end

    def take(self, job: Sequence, tokens: Several[Token]) -> int:
        """The step under way gave these tokens, which the job has taken; how many drafts it had for them."""
        if (drafts := self._guesses_of(job)) is None:
            return 0
        if num_drafts := len(drafts.drafted.token_ids):
            drafts.verified(len(tokens) - 1)
        else:
            self._came.append((job, tokens[-1].id, job.num_prompt + job.num_generated))
        return num_drafts

    def learn(self) -> None:
        """Does what was left for when the ranks have the next plan: takes in how long steps took, enters what was read,
        and compares what came with what would have been drafted."""
        for plan, seconds in self._measured:
            if isinstance(plan.work, Decode) and not any(row.terms or row.num_reference for row in plan.work.rows):
                self._costs.measure(len(plan.work.rows), plan.num_drafts, seconds)
        self._measured.clear()
        for segment, end in self._read.items():
            self._indexes.enter(segment, end)
        self._read.clear()
        num_came = len(self._came)
        first, most = self._num_learned // TURN_STEPS * MAX_COMPARED, MAX_COMPARED * self._policy.has_room(num_came)
        for number, (job, token_id, end) in enumerate(self._came):
            if job.guesses and job.is_running and job.guesses.tail is job.tail.segment and end <= job.tail.segment.end:
                if (number - first) % num_came < most:
                    job.guesses.enter(ENTERED_AT_ONCE)
                    job.guesses.compare(token_id, end)
                else:
                    job.guesses.skip()
        self._num_learned += num_came > 0
        self._came.clear()


def _chances(job: Sequence, draft: Draft) -> list[float]:
    return job.guesses.acceptance.of(draft) if job.guesses else []


def _with_draft(job: Sequence, row: Row, draft: Draft, length: int) -> Row:
    if not length or job.guesses is None:
        return row
    draft = draft.cut(length)
    job.guesses.verify(draft)
    return job.with_drafts(row, draft.token_ids)
