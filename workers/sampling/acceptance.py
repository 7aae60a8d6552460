"""Which drafts are accepted, on the device that has the logits: the host waits for nothing, and shapes tell nothing.

Tokens are chosen at all positions of a step at once. What penalties count at a position are the drafts before it, as if
all of them were accepted: where one is not, nobody asks what was chosen behind it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.rank_protocol.step import Row

NOT_FINITE = -1
"""Stands for the id of a token where the logits are not finite."""
NOT_REACHED = -2
"""Stands for the id of a token behind a draft that was not accepted."""
NO_DRAFT = -3
"""No id, and nothing that stands for one."""


class DraftRows(NamedTuple):
    """What lies at the R positions of a step, int64: a sequence's first one, then those behind its drafts."""

    ids: Tensor
    """The draft that is tried behind each; NO_DRAFT where there is none."""
    numbers: Tensor
    """How many drafts of its sequence lie before each."""

    def before(self, most: int) -> Tensor:
        """The drafts before each position, the nearest first, [R, most] with NO_DRAFT behind them."""
        rows_R = torch.arange(len(self.ids), device=self.ids.device)
        back_M = torch.arange(1, most + 1, device=self.ids.device)
        ids_RM = self.ids[(rows_R[:, None] - back_M).clamp_(min=0)]
        return torch.where(back_M <= self.numbers[:, None], ids_RM, NO_DRAFT)

    def reached(self, ids_R: Tensor) -> Tensor:
        """Whether all drafts before each position are the ids that were chosen there. What is not finite behind drafts
        counts as not reached: it will be so in the next step, too."""
        is_right_R = ids_R == self.ids
        misses_R = (~is_right_R).cumsum(dim=0) - (~is_right_R).long()  # of all positions before
        firsts_R = torch.arange(len(ids_R), device=ids_R.device) - self.numbers
        is_behind_R = (misses_R == misses_R[firsts_R]) & (ids_R != NOT_FINITE)
        return is_behind_R | (self.numbers == 0)


def drafts_of(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Drafts and numbers, see `DraftRows`, of the positions of rows."""
    ids = [draft for row in rows for draft in (*row.draft_ids, NO_DRAFT)]
    return ids, [number for row in rows for number in range(1 + len(row.draft_ids))]


def reached_ids(rows: Sequence[Row], told: Sequence[int]) -> Iterator[Sequence[int]]:
    """The ids of each row's positions that were reached, of what is told of all."""
    start = 0
    for row in rows:
        end = start + 1 + len(row.draft_ids)
        yield [token_id for token_id in told[start:end] if token_id != NOT_REACHED]
        start = end
