"""Acceptance of drafts on the device that holds the logits: the host does not wait, and shapes do not depend on
results.

Tokens are sampled at all positions of a step at once. At each position, penalties count the drafts before it as if all
of them were accepted; if one is not, the tokens sampled behind it are discarded.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.rank_protocol.step import Row

NOT_FINITE = -1
"""Placeholder for a token whose logits are not finite."""
NOT_REACHED = -2
"""Placeholder for a token behind a draft that was not accepted."""
NO_DRAFT = -3
"""Marks the absence of a draft; equal to no id and to no placeholder."""


class DraftRows(NamedTuple):
    """The drafts at the R positions of a step, int64. Each sequence has its first position, then one behind each
    draft.
    """

    ids: Tensor
    """The draft to compare with the token sampled at each position; NO_DRAFT where there is none."""
    numbers: Tensor
    """The number of drafts of the same sequence before each position."""

    def before(self, most: int) -> Tensor:
        """The drafts before each position, the nearest first, [R, most], padded with NO_DRAFT."""
        rows_R = torch.arange(len(self.ids), device=self.ids.device)
        back_M = torch.arange(1, most + 1, device=self.ids.device)
        ids_RM = self.ids[(rows_R[:, None] - back_M).clamp_(min=0)]
        return torch.where(back_M <= self.numbers[:, None], ids_RM, NO_DRAFT)

    def reached(self, ids_R: Tensor) -> Tensor:
        """Whether all drafts before each position equal the ids sampled there. A position with non-finite logits behind
        drafts counts as not reached: the next step will fail the same way.
        """
        is_right_R = ids_R == self.ids
        misses_R = (~is_right_R).cumsum(dim=0) - (~is_right_R).long()  # misses at earlier positions
        firsts_R = torch.arange(len(ids_R), device=ids_R.device) - self.numbers
        is_behind_R = (misses_R == misses_R[firsts_R]) & (ids_R != NOT_FINITE)
        return is_behind_R | (self.numbers == 0)


def drafts_of(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Drafts and numbers, see `DraftRows`, of the positions of rows."""
    ids = [draft for row in rows for draft in (*row.draft_ids, NO_DRAFT)]
    return ids, [number for row in rows for number in range(1 + len(row.draft_ids))]


def accepted_ids(rows: Sequence[Row], chosen: Sequence[int]) -> Iterator[Sequence[int]]:
    """The ids of each row's reached positions, given the reported ids of all positions."""
    start = 0
    for row in rows:
        end = start + 1 + len(row.draft_ids)
        yield [token_id for token_id in chosen[start:end] if token_id != NOT_REACHED]
        start = end
