"""The drafts of one sequence, their results, and the comparison with shadow drafts. Pure."""

from collections.abc import Sequence

from coordinator.kv_cache.token_paths import Segment
from coordinator.speculation.acceptance import Acceptance, ShadowDrafts
from coordinator.speculation.ngram_drafter import NO_DRAFT, Draft, NgramDrafter, NgramIndexes
from coordinator.speculation.ngram_index import MAX_SIZE


class SequenceDrafter:
    """The drafts of a sequence. `tail` is the segment that it grows, which changes when it restarts."""

    def __init__(self, tail: Segment, indexes: NgramIndexes, max_drafts: int, prior: Acceptance | None = None) -> None:
        """`prior` has the acceptance rates of sequences with the same context."""
        self.acceptance = Acceptance(max_drafts, prior)
        self._comparison = ShadowDrafts(self.acceptance)
        self._max_drafts = max_drafts
        self._indexes = indexes
        self.drafted = NO_DRAFT
        """The draft that the step under way verifies."""
        self._forced: tuple[int, tuple[int, ...]] = (0, ())
        """A position, and tokens that the grammar forces there."""
        self._move(tail)

    def _move(self, tail: Segment) -> None:
        self.tail = tail
        self._drafts = NgramDrafter(tail, self._indexes)
        self._is_indexed = False

    def set_tail(self, tail: Segment) -> None:
        """Switches to the segment `tail`. The acceptance rates are kept."""
        if tail is not self.tail:
            self.drafted = NO_DRAFT
            self._comparison.drop()
            self._move(tail)

    def draft(self, end: int, count: int) -> Draft:
        """At most `count` tokens that may follow position `end`; all tokens before it must be known. Tokens that the
        grammar forces are as likely as those after the longest n-gram."""
        forced_end, forced = self._forced
        if forced_end == end and count > 0:
            return Draft(MAX_SIZE, forced[:count])
        return self._drafts.draft(end, count)

    def record_forced(self, end: int, token_ids: Sequence[int]) -> None:
        """Records tokens that the grammar forces at position `end`."""
        self._forced = end, tuple(token_ids)

    def verify(self, draft: Draft) -> None:
        """Records that a step verifies this draft."""
        self.drafted = draft
        self._comparison.drop()

    def verified(self, num_accepted: int) -> None:
        """Records that the first `num_accepted` tokens of the draft were accepted."""
        self.acceptance.verified(self.drafted, num_accepted)
        self.drafted = NO_DRAFT

    def compare(self, token_id: int, end: int) -> None:
        """Compares a token that was sampled without a draft, and that ends at position `end`, with the shadow draft."""
        self._comparison.record(token_id, lambda: self.draft(end, self._max_drafts))

    def skip(self) -> None:
        """Records that a token was sampled without a draft and is not compared."""
        self._comparison.drop()

    def index_path(self, num_tokens: int) -> None:
        """Indexes up to `num_tokens` tokens of the path that were not indexed during the prefill, as after a
        restart."""
        if not self._is_indexed:
            self._is_indexed = self._drafts.index_path(num_tokens)
