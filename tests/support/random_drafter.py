"""A drafter whose drafts are right, wrong or random, at any cost."""

import random
from collections.abc import Sequence

from coordinator.scheduling.sequences import SequenceJob
from coordinator.scheduling.speculation import Drafter
from coordinator.speculation.draft_length import DraftLengthPolicy
from coordinator.speculation.ngram_drafter import NO_DRAFT, Draft
from longleaf.config import EngineConfig
from tests.support.fakes.echo_model import echo_token


class RandomDrafter(Drafter):
    """Drafts for ranks that echo. Whether steps wait for drafts, and how long these are, is drawn."""

    KINDS = ("found", "right", "wrong", "anything")
    """`found`: drafts of the real drafter."""

    def __init__(self, config: EngineConfig, kind: str, seed: int = 0) -> None:
        super().__init__(config.max_sequences, config.max_draft_tokens, config.block_size)
        self._kind = kind
        self._random = random.Random(seed)
        self._policy = RandomPolicy(self._random)

    def _draft_next(self, job: SequenceJob) -> Draft:
        most = min(self._max_drafts, job.most_drafts(self._block_size))
        if most <= 0 or self._drafter_of(job) is None:
            return NO_DRAFT
        if self._kind == "found":
            return super()._draft_next(job)
        last, found = job.tail.segment.token_ids[-1], list[int]()
        for i in range(most):
            last = echo_token(last, job.num_generated + i)
            is_right = self._kind == "right" or (self._kind == "anything" and self._random.random() < 0.6)
            found.append(last if is_right else last + 1)
        return Draft(1, tuple(found))


class RandomPolicy(DraftLengthPolicy):
    """Makes random decisions."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def is_worth_waiting(self, expected: Sequence[Sequence[float]]) -> bool:
        return self._rng.random() < 0.7

    def has_room(self, num_sequences: int) -> bool:
        return True

    def lengths(self, offered: Sequence[Sequence[float]]) -> list[int]:
        return [self._rng.randint(0, len(chances)) for chances in offered]
