"""What may follow in one sequence: its drafts, what became of them, and what would have become of others. Pure."""

from coordinator.kv_cache.token_paths import Segment
from coordinator.speculation.acceptance import Acceptance, ShadowDrafts
from coordinator.speculation.ngram_drafter import NO_DRAFT, Draft, NgramDrafter, NgramIndexes


class SequenceDrafter:
    """The drafts of a sequence. `tail` is the segment that it grows; another one when it begins anew."""

    def __init__(self, tail: Segment, indexes: NgramIndexes, max_drafts: int, usual: Acceptance | None = None) -> None:
        """`usual` is what became of the drafts of others that ask alike."""
        self.acceptance = Acceptance(max_drafts, usual)
        self._comparison = ShadowDrafts(self.acceptance)
        self._max_drafts = max_drafts
        self._indexes = indexes
        self.drafted = NO_DRAFT
        """What is verified by the step under way."""
        self._move(tail)

    def _move(self, tail: Segment) -> None:
        self.tail = tail
        self._drafts = NgramDrafter(tail, self._indexes)
        self._is_entered = False

    def follow(self, tail: Segment) -> None:
        """The sequence grows this segment now. What was learned stays."""
        if tail is not self.tail:
            self.drafted = NO_DRAFT
            self._comparison.drop()
            self._move(tail)

    def draft(self, end: int, count: int) -> Draft:
        """At most `count` tokens that may follow position `end`, before which all are known."""
        return self._drafts.draft(end, count)

    def verify(self, draft: Draft) -> None:
        """A step verifies this draft."""
        self.drafted = draft
        self._comparison.drop()

    def verified(self, num_accepted: int) -> None:
        """So many of the draft were what was sampled."""
        self.acceptance.verified(self.drafted, num_accepted)
        self.drafted = NO_DRAFT

    def compare(self, token_id: int, end: int) -> None:
        """A token came without a draft; it lies before position `end`."""
        self._comparison.take(token_id, lambda: self.draft(end, self._max_drafts))

    def skip(self) -> None:
        """A token came without a draft, and is not compared."""
        self._comparison.drop()

    def enter(self, num_tokens: int) -> None:
        """Enters so many tokens of the path that nobody entered while they were read, as after a restart."""
        if not self._is_entered:
            self._is_entered = self._drafts.enter(num_tokens)
