"""How likely it is that drafts of a sequence are accepted, from what became of its recent ones. Pure."""

from collections.abc import Callable

from coordinator.speculation.ngram_drafter import Draft

DECAY = 0.85
"""What an outcome of a sequence still counts after the next one of its kind."""
USUAL_DECAY = 0.98
"""The same of all sequences that ask alike."""
PRIOR_COUNT = 1.0
"""As many outcomes a guess counts for."""
NUM_KINDS = 4
"""Of n-grams, by size: 1, 2 to 3, 4 to 7, and longer."""


class AcceptanceRate:
    """How often something happened lately, between a prior guess and what was seen. The guess is what is usual, where
    there is such a thing."""

    def __init__(self, usual: "AcceptanceRate | None", decay: float) -> None:
        self._usual = usual
        self._decay = decay
        self._yes = 0.0
        self._count = 0.0

    def add(self, is_so: bool) -> None:
        self._yes = self._yes * self._decay + is_so
        self._count = self._count * self._decay + 1
        if self._usual is not None:
            self._usual.add(is_so)

    def value(self, prior: float) -> float:
        prior = prior if self._usual is None else self._usual.value(prior)
        return (self._yes + PRIOR_COUNT * prior) / (self._count + PRIOR_COUNT)


class Acceptance:
    """Chances of the drafts of one sequence; none before anything was seen, of it or of what is `usual`.

    That of each draft, if those before it are accepted, is learned by itself; where little was seen of it, it is like
    the one before. That of the first depends on the n-gram that it was found by.
    """

    def __init__(self, max_drafts: int, usual: "Acceptance | None" = None, decay: float = DECAY) -> None:
        """`usual` are the chances of all that ask alike, for as many drafts; what is seen here counts there, too."""
        usual_chances: list[AcceptanceRate | None] = [*usual.chances] if usual else [None] * (NUM_KINDS + max_drafts)
        self.chances = [AcceptanceRate(each, decay) for each in usual_chances]
        self._found = self.chances[0]
        """That there is a draft, and its first token is accepted."""
        self._first = self.chances[1 : 1 + NUM_KINDS]
        """That the first one is, by the kind of n-gram."""
        self._next = self.chances[1 + NUM_KINDS :]
        """That the second, the third, ... is, if those before it are."""

    @property
    def max_drafts(self) -> int:
        return 1 + len(self._next)

    def add(self, size: int, number: int, is_right: bool) -> None:
        """Takes in whether draft `number`, from 0 on, was accepted, after all before it were; `size` is that of its
        n-gram, 0 where nothing was found: then no draft was right."""
        if number:
            self._next[number - 1].add(is_right)
            return
        self._found.add(is_right)
        if size:
            self._first[_kind(size)].add(is_right)

    def verified(self, draft: Draft, num_accepted: int) -> None:
        """Takes in what a step made of a draft."""
        for number in range(min(num_accepted + 1, max(1, len(draft.token_ids)))):
            self.add(draft.size, number, number < num_accepted)

    def expected(self) -> list[float]:
        """The chances that at least 1, 2, ... tokens of the next draft are accepted, whatever will be found."""
        return self._chances(self._found.value(0.0), self.max_drafts)

    def of(self, draft: Draft) -> list[float]:
        """The chances that at least 1, 2, ... tokens of this draft are accepted."""
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
    """The kind of an n-gram of so many tokens."""
    return min(size.bit_length(), NUM_KINDS) - 1


class ShadowDrafts:
    """What a sequence without drafts would have had of them: compared with the tokens that came instead.

    As with drafts in steps, the next draft begins behind the token after those that were right.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._draft: Draft | None = None
        self._num_right = 0

    def take(self, token_id: int, next_draft: Callable[[], Draft]) -> None:
        """Takes in the next token of the answer. Drafts anew by `next_draft`, after that token, where the draft before
        has come to its end."""
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
        """What comes next is no answer to what was drafted: the sequence has drafts in steps, or has begun anew."""
        self._draft = None
