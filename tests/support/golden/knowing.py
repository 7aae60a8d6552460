"""A drafter that knows the answers, with a configurable share of right drafts. The engine is real."""

import random
from collections.abc import Sequence

from coordinator.scheduling.sequences import SequenceJob
from coordinator.scheduling.speculation import Drafter
from coordinator.speculation.ngram_drafter import NO_DRAFT, Draft
from coordinator.speculation.sequence_drafter import SequenceDrafter
from tests.support.random_drafter import RandomPolicy

MOST = 7


class KnowingDrafter(Drafter):
    """Drafts the continuation of the answer that matches the output; each token is right with the probability `share`.
    Waiting and draft lengths are random.
    """

    def __init__(self, block_size: int, answers: Sequence[Sequence[int]], share: float, seed: int = 0) -> None:
        super().__init__(64, MOST, block_size)
        self._answers = answers
        self._share = share
        self._random = random.Random(seed)
        self._policy = RandomPolicy(self._random)
        self.num_right = self.num_wrong = 0

    def _drafter_of(self, job: SequenceJob) -> SequenceDrafter | None:
        if job.drafter is None:
            job.drafter = SequenceDrafter(job.tail.segment, self._indexes, MOST)
        job.drafter.set_tail(job.tail.segment)
        return job.drafter

    def _draft_next(self, job: SequenceJob) -> Draft:
        output, left = tuple(job.generated), job.max_requested - job.num_requested
        most = min(MOST, left, job.tail.num_spare(self._block_size))
        known = next((answer for answer in self._answers if tuple(answer[: len(output)]) == output), ())
        found = [
            token if self._random.random() < self._share else (token + 1) % 500
            for token in known[len(output) : len(output) + max(0, most)]
        ]
        return Draft(1, tuple(found)) if found and self._drafter_of(job) else NO_DRAFT

    def record_tokens(self, job: SequenceJob, tokens: Sequence[object]) -> int:
        num_drafts = super().record_tokens(job, tokens)  # type: ignore[arg-type]
        self.num_right += len(tokens) - 1
        self.num_wrong += num_drafts - len(tokens) + 1
        return num_drafts
