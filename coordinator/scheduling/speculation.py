"""Speculative decoding: drafts for the sequences of a step, and the decision whether a step waits for them. Pure: its
callers pass measured times."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from coordinator.kv_cache.block_placer import BlockPlacer
from coordinator.kv_cache.token_paths import Segment
from coordinator.scheduling.sequences import SequenceJob
from coordinator.speculation.acceptance import CONTEXT_DECAY, Acceptance
from coordinator.speculation.draft_length import DraftLengthPolicy
from coordinator.speculation.ngram_drafter import NO_DRAFT, Draft, NgramIndexes
from coordinator.speculation.sequence_drafter import SequenceDrafter
from coordinator.speculation.step_cost_model import StepCostModel
from longleaf.rank_protocol.step import Decode, Row, StepPlan
from longleaf.sampling import Token

MAX_INDEXED_TOKENS = 8192
"""Maximum number of tokens of a path that are added to the n-gram index between two steps, if they were not added
during the prefill."""
MAX_COMPARED = 4
"""Maximum number of sequences per step without drafts whose tokens are compared with shadow drafts."""
TURN_STEPS = 64
"""Number of steps after which other sequences are compared."""


class Drafter:
    """Drafts for whole steps. The state of a sequence is in its `drafter`."""

    def __init__(self, max_rows: int, max_drafts: int, block_size: int) -> None:
        """Steps have at most `max_rows` rows, and sequences at most `max_drafts` drafts; 0 disables drafts."""
        self._max_drafts = max_drafts
        self._block_size = block_size
        self._indexes = NgramIndexes()
        self._usual = WeakKeyDictionary[Segment, Acceptance]()
        """Acceptance rates by the first segment of a context."""
        self._costs = StepCostModel()
        self._policy = DraftLengthPolicy(max_rows, max_drafts, self._costs)
        self._prefilled_ends = dict[Segment, int]()
        """Segments that have grown, and the end positions of their new tokens."""
        self._measured = list[tuple[StepPlan, float]]()
        """Steps, and their durations in seconds."""
        self._recorded_tokens = list[tuple[SequenceJob, int, int]]()
        """Tokens sampled without drafts: the sequence, the token id, and the position after the token."""
        self._num_learned = 0
        """Number of times that such tokens were compared."""

    def needs_previous_result(self, jobs: Sequence[SequenceJob]) -> bool:
        """Whether the next step of these jobs should have drafts, so that it must wait for the result of the previous
        step."""
        if not (self._max_drafts and self._policy.has_room(len(jobs))):
            return False
        drafts = map(self._drafter_of, jobs)  # even for a new job: others may have queried its context
        return self._policy.is_worth_waiting([each.acceptance.expected() if each else [] for each in drafts])

    def draft(self, jobs: Sequence[SequenceJob], rows: Sequence[Row], placer: BlockPlacer) -> tuple[Row, ...]:
        """The rows, with drafts where they pay off. No step of these sequences may be in flight. Drafts take recurrent
        states only from those that are free."""
        if not (self._max_drafts and self._policy.has_room(len(jobs))):
            return tuple(rows)
        drafts = [NO_DRAFT if row.terms else self._draft_next(job) for job, row in zip(jobs, rows, strict=True)]
        lengths = self._policy.lengths([_chances(job, draft) for job, draft in zip(jobs, drafts, strict=True)])
        return tuple(
            _with_draft(job, row, draft, length, placer)
            for job, row, draft, length in zip(jobs, rows, drafts, lengths, strict=True)
        )

    def _draft_next(self, job: SequenceJob) -> Draft:
        """The draft after the token that was placed just now."""
        most = min(self._max_drafts, job.most_drafts(self._block_size))
        drafts = self._drafter_of(job) if most > 0 else None
        return drafts.draft(job.tail.segment.end, most) if drafts else NO_DRAFT

    def _drafter_of(self, job: SequenceJob) -> SequenceDrafter | None:
        if not (self._max_drafts and job.may_draft):
            return None
        if job.drafter is None:
            job.drafter = SequenceDrafter(job.tail.segment, self._indexes, self._max_drafts, self._usual_of(job))
        job.drafter.set_tail(job.tail.segment)
        return job.drafter

    def _usual_of(self, job: SequenceJob) -> Acceptance | None:
        """The acceptance rates shared by all sequences that query the same context, since questions are similar."""
        if not (segments := job.request.origin.segments):
            return None
        return self._usual.setdefault(segments[0], Acceptance(self._max_drafts, decay=CONTEXT_DECAY))

    # --- measurements ---

    def measure(self, plan: StepPlan, seconds: float) -> None:
        """Records the duration of a step, for `learn`."""
        self._measured.append((plan, seconds))

    def measure_gap(self, seconds: float, *, is_ahead: bool) -> None:
        """Records the time between two decode steps. `is_ahead`: the second step was sent before the first one had
        ended."""
        self._costs.measure_gap(seconds, is_ahead=is_ahead)

    def record_prefilled(self, segment: Segment, end: int) -> None:
        """Records that tokens of a segment before position `end` were processed, for `learn`."""
        if self._max_drafts:
            self._prefilled_ends[segment] = end

    def record_tokens(self, job: SequenceJob, tokens: Sequence[Token]) -> int:
        """Records the tokens of a step, which the job has added to its answer. Returns the number of drafts in the
        step."""
        if (drafts := self._drafter_of(job)) is None:
            return 0
        if num_drafts := len(drafts.drafted.token_ids):
            drafts.verified(len(tokens) - 1)
        else:
            self._recorded_tokens.append((job, tokens[-1].id, job.num_prompt + job.num_generated))
        return num_drafts

    def record_forced(self, job: SequenceJob, token_ids: Sequence[int]) -> None:
        """Records tokens that the grammar of a job forces after the tokens of a step, which the job has added to its
        answer."""
        if (drafts := self._drafter_of(job)) is not None:
            drafts.record_forced(job.num_prompt + job.num_generated, token_ids)

    def learn(self) -> None:
        """Processes the recorded data once the ranks have the next plan: step durations, tokens for the n-gram index,
        and comparisons of sampled tokens with shadow drafts."""
        for plan, seconds in self._measured:
            if isinstance(plan.work, Decode) and not any(row.terms or row.num_reference for row in plan.work.rows):
                self._costs.measure(len(plan.work.rows), plan.num_drafts, seconds)
        self._measured.clear()
        for segment, end in self._prefilled_ends.items():
            self._indexes.index_segment(segment, end)
        self._prefilled_ends.clear()
        num_came = len(self._recorded_tokens)
        first, most = self._num_learned // TURN_STEPS * MAX_COMPARED, MAX_COMPARED * self._policy.has_room(num_came)
        for number, (job, token_id, end) in enumerate(self._recorded_tokens):
            if job.drafter and job.is_running and job.drafter.tail is job.tail.segment and end <= job.tail.segment.end:
                if (number - first) % num_came < most:
                    job.drafter.index_path(MAX_INDEXED_TOKENS)
                    job.drafter.compare(token_id, end)
                else:
                    job.drafter.skip()
        self._num_learned += num_came > 0
        self._recorded_tokens.clear()


def _chances(job: SequenceJob, draft: Draft) -> list[float]:
    return job.drafter.acceptance.probabilities(draft) if job.drafter else []


def _with_draft(job: SequenceJob, row: Row, draft: Draft, length: int, placer: BlockPlacer) -> Row:
    if placer.num_draft_states is not None:
        length = min(length, placer.num_draft_states)
    if not length or job.drafter is None:
        return row
    draft = draft.cut(length)
    job.drafter.verify(draft)
    return job.with_drafts(row, draft.token_ids, placer)
