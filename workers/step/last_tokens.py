"""The last token of each sequence, which its next row brings to the model though no plan tells it.

A CPU's ranks know it as soon as it is chosen. On another device it stays there: the host goes on without knowing it,
and names the place where it lies.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from longleaf.rank_protocol.step import Row
from workers.host_copies import to_device
from workers.sampling.acceptance import NOT_REACHED, drafts_of, reached_ids

NOBODY = 0
"""The place of what no sequence has said."""
ANY = 0
"""The last id of a sequence that has no token, since its logits are not finite: ranks go on with it until it is
released."""


class LastTokens(Protocol):
    """What a rank remembers."""

    def __getitem__(self, sequence: int, /) -> int:
        """The id, or what stands for it among token ids."""
        ...

    def resolve(self, token_ids_T: Tensor) -> Tensor:
        """Ids [T], int64, with the ids that others stand for."""
        ...

    def note(self, rows: Sequence[Row], told_N: Tensor) -> None:
        """Remembers of each row the last id that was reached, of what was told of its positions, int64."""
        ...

    def forget(self, sequences: Iterable[int]) -> None:
        """Sequences that have ended need not be known."""
        ...

    def clear(self) -> None:
        """No sequence is known any more."""
        ...


class HostIds(dict[int, int]):
    """Ids by sequence. Implements LastTokens."""

    def resolve(self, token_ids_T: Tensor) -> Tensor:
        return token_ids_T

    def note(self, rows: Sequence[Row], told_N: Tensor) -> None:
        for row, ids in zip(rows, reached_ids(rows, told_N.tolist()), strict=True):
            self[row.sequence] = max(ids[-1], ANY)

    def forget(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self.pop(sequence, None)


class DeviceIds:
    """Ids in a tensor of fixed address, a place for each of so many sequences. Implements LastTokens.

    Among token ids a place is told as a negative number: -1 - place.
    """

    def __init__(self, num_sequences: int, device: str) -> None:
        self._device = device
        self._ids_P = torch.zeros(num_sequences + 1, dtype=torch.long, device=device)
        self._free = list(range(num_sequences, NOBODY, -1))
        self._places: dict[int, int] = {}

    def __getitem__(self, sequence: int) -> int:
        return -1 - self._places[sequence]

    def place(self, sequence: int) -> int:
        """Where the last id of a sequence lies, or will."""
        if sequence not in self._places:
            self._places[sequence] = self._free.pop()
        return self._places[sequence]

    def resolve(self, token_ids_T: Tensor) -> Tensor:
        places_T = (-1 - token_ids_T).clamp_(min=NOBODY)
        return torch.where(token_ids_T < 0, self._ids_P[places_T], token_ids_T)

    def note(self, rows: Sequence[Row], told_N: Tensor) -> None:
        numbers = [self.places(rows)]
        if len(numbers[0]) > len(rows):
            numbers.append(drafts_of(rows)[1])
        self.put(*to_device(torch.tensor(numbers, dtype=torch.long), self._device), told_N=told_N)

    def places(self, rows: Iterable[Row]) -> list[int]:
        """Where the ids of rows' positions lie, or will, if they are the last ones."""
        return [self.place(row.sequence) for row in rows for _ in range(1 + len(row.draft_ids))]

    def put(self, places_N: Tensor, numbers_N: Tensor | None = None, *, told_N: Tensor) -> None:
        """Remembers at its place the last id of each sequence that was reached. Positions are numbered as in
        `Drafts`; without numbers each is a sequence's only one."""
        ids_N = told_N.clamp(min=ANY)
        if numbers_N is None:
            self._ids_P.index_copy_(0, places_N, ids_N)
            return
        is_reached_N = told_N != NOT_REACHED
        is_followed_N = (is_reached_N & (numbers_N > 0)).roll(-1)  # the first one follows nobody
        self._ids_P.index_copy_(0, torch.where(is_reached_N & ~is_followed_N, places_N, NOBODY), ids_N)

    def forget(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            if (place := self._places.pop(sequence, None)) is not None:
                self._free.append(place)

    def clear(self) -> None:
        self.forget([*self._places])
