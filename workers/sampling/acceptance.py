"""Which drafts are accepted, on the device that has the logits: the host waits for nothing.

Positions are taken by turns: first the one behind each sequence's last token, then the one behind its first draft, and
so on, since what penalties count changes from one to the next. Sequences of most drafts come first, so those of a turn
are the first ones of the turn before.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf.channel.step import Row
from workers.sampling.fixed_shape import Parameters
from workers.sampling.history import NOBODY
from workers.sampling.sampler import first_positions

NOT_REACHED = -2
"""Stands for the id of a token behind a draft that was not accepted."""
NO_DRAFT = -3
"""No id, and nothing that stands for one."""
Choose = Callable[[Tensor, Parameters], Tensor]
"""From logits [L, V] and parameters [L] what `fixed_shape.choose` tells, [L, C]."""


class Turns(NamedTuple):
    """The N positions from which a step is sampled, in the order in which that is done."""

    positions: list[int]
    """In the order of the plan: a sequence's first one, then those behind its drafts."""
    owners: list[int]
    """The row of each."""
    numbers: list[int]
    """How many drafts lie before each."""
    drafts: list[int]
    """The draft behind each."""
    sizes: list[int]
    """Positions of each turn."""


def turns_of(rows: Sequence[Row]) -> Turns:
    """The turns of rows, some of which have drafts."""
    firsts = first_positions(rows)
    owners = sorted(range(len(rows)), key=lambda i: -len(rows[i].draft_ids))
    turns = [
        [i for i in owners if len(rows[i].draft_ids) >= turn] for turn in range(1 + len(rows[owners[0]].draft_ids))
    ]
    pairs = [(i, turn) for turn, some in enumerate(turns) for i in some]
    return Turns(
        positions=[firsts[i] + turn for i, turn in pairs],
        owners=[i for i, _ in pairs],
        numbers=[turn for _, turn in pairs],
        drafts=[(*rows[i].draft_ids, NO_DRAFT)[turn] for i, turn in pairs],
        sizes=[len(some) for some in turns],
    )


def verify(
    logits_NV: Tensor, drafts_N: Tensor, parameters_N: Parameters, sizes: Sequence[int], choose: Choose
) -> Tensor:
    """What `choose` tells of each position, all in the order of turns: [N, C], with the id NOT_REACHED behind drafts
    that are not accepted. Nothing of those is noted in the histories of their sequences."""
    is_finite_N = logits_NV.amax(dim=-1).isfinite()
    parts, start, is_left_L = list[Tensor](), 0, is_finite_N
    for turn, size in enumerate(sizes):
        some = slice(start, start + size)
        parameters_L = parameters_N.of(some)
        if turn:
            is_left_L = is_left_L[:size] & is_finite_N[some]
            parameters_L = parameters_L._replace(place=torch.where(is_left_L, parameters_L.place, NOBODY))
        told_LC = choose(logits_NV[some], parameters_L)
        if turn:
            told_LC[:, 0].masked_fill_(~is_left_L, NOT_REACHED)
        is_left_L = told_LC[:, 0] == drafts_N[some]
        parts.append(told_LC)
        start += size
    return torch.cat(parts)
