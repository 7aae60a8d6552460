"""Acceptance probabilities of drafts, estimated from recent outcomes. Pure."""

from collections.abc import Callable

from coordinator.speculation.ngram_drafter import Draft

DECAY = 0.85
"""Factor by which each outcome of a sequence reduces the weight of the earlier ones of its kind."""
CONTEXT_DECAY = 0.98
"""The same factor for the outcomes of all sequences with the same context."""
PRIOR_COUNT = 1.0
"""Weight of the prior, as a number of outcomes."""
NUM_KINDS = 4
"""Kinds of n-grams, by size: 1, 2 to 3, 4 to 7, and longer."""


class AcceptanceRate:
    """The recent frequency of an event, combined with a prior. The prior is the rate `prior`, if there is one."""

    def __init__(self, prior: "AcceptanceRate | None", decay: float) -> None:
        self._prior = prior
        self._decay = decay
        self._yes = 0.0
        self._count = 0.0

    def add(self, is_so: bool) -> None:
        self._yes = self._yes * self._decay + is_so
        self._count = self._count * self._decay + 1
        if self._prior is not None:
            self._prior.add(is_so)

    def value(self, prior: float) -> float:
        prior = prior if self._prior is None else self._prior.value(prior)
        return (self._yes + PRIOR_COUNT * prior) / (self._count + PRIOR_COUNT)


class Acceptance:
    """Acceptance probabilities of the drafts of one sequence. They are 0 before the first outcome of the sequence or
    of `prior`.

    The probability of each draft token, given that those before it are accepted, is estimated separately. With few
    outcomes, the estimate is close to that of the previous token. The estimate of the first token depends on the size
    of the n-gram that matched.
    """

    def __init__(self, max_drafts: int, prior: "Acceptance | None" = None, decay: float = DECAY) -> None:
        """`prior` has the probabilities of all sequences with the same context, for as many drafts; outcomes are also
        added there."""
        prior_chances: list[AcceptanceRate | None] = [*prior.chances] if prior else [None] * (NUM_KINDS + max_drafts)
        self.chances = [AcceptanceRate(each, decay) for each in prior_chances]
        self._found = self.chances[0]
        """Probability that there is a draft whose first token is accepted."""
        self._first = self.chances[1 : 1 + NUM_KINDS]
        """Probability that the first token is accepted, by kind of n-gram."""
        self._next = self.chances[1 + NUM_KINDS :]
        """Probabilities of the second, the third, ... token, given that the tokens before it are accepted."""

    @property
    def max_drafts(self) -> int:
        return 1 + len(self._next)

    def add(self, size: int, number: int, is_right: bool) -> None:
        """Records whether draft token `number`, counted from 0, was accepted, given that all tokens before it were.
        `size` is the size of the n-gram; 0 means that there was no draft, which counts as not accepted."""
        if number:
            self._next[number - 1].add(is_right)
            return
        self._found.add(is_right)
        if size:
            self._first[_kind(size)].add(is_right)

    def verified(self, draft: Draft, num_accepted: int) -> None:
        """Records the result of a verification."""
        for number in range(min(num_accepted + 1, max(1, len(draft.token_ids)))):
            self.add(draft.size, number, number < num_accepted)

    def expected(self) -> list[float]:
        """The probabilities that at least 1, 2, ... tokens of the next draft are accepted, before it is known."""
        return self._chances(self._found.value(0.0), self.max_drafts)

    def probabilities(self, draft: Draft) -> list[float]:
        """The probabilities that at least 1, 2, ... tokens of this draft are accepted."""
        if not draft.size:
            return []
        first = self._first[_kind(draft.size)].value(self._found.value(0.0))
        return self._chances(first, len(draft.token_ids))

    def _chances(self, first: float, count: int) -> list[float]:
        chances, chance = [first], first
        for each in self._next[: count - 1]:
            chance = each.value(chance)
            chances.append(chances[-1] * chance)
        return chances


def _kind(size: int) -> int:
    """The kind of an n-gram of `size` tokens."""
    return min(size.bit_length(), NUM_KINDS) - 1


class ShadowDrafts:
    """Shadow drafts of a sequence without drafts: they are compared with the sampled tokens instead of being verified.

    As with verified drafts, the next draft begins after the token that follows the accepted ones.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._draft: Draft | None = None
        self._num_right = 0

    def record(self, token_id: int, next_draft: Callable[[], Draft]) -> None:
        """Records the next token of the answer. If the last draft has ended, calls `next_draft` for a draft after that
        token."""
        draft, number = self._draft, self._num_right
        if draft is not None and number < len(draft.token_ids):
            is_right = draft.token_ids[number] == token_id
            self._acceptance.add(draft.size, number, is_right)
            if is_right:
                self._num_right += 1
                return
        self._draft, self._num_right = next_draft(), 0
        if not self._draft.size:
            self._acceptance.add(0, 0, False)

    def drop(self) -> None:
        """Discards the draft: the next tokens do not follow it, because the sequence has verified drafts or has
        restarted."""
        self._draft = None
