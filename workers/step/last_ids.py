"""The last token of each sequence, which its next row brings to the model though no plan tells it.

A CPU's ranks know it as soon as it is chosen. On another device it stays there: the host goes on without knowing it,
and names the place where it lies.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from longleaf.channel.step import Row
from workers.transfers import to_device

NOBODY = 0
"""The place of what no sequence has said."""


class LastIds(Protocol):
    """What a rank remembers."""

    def __getitem__(self, sequence: int, /) -> int:
        """The id, or what stands for it among token ids."""
        ...

    def resolve(self, token_ids_T: Tensor) -> Tensor:
        """Ids [T], int64, with the ids that others stand for."""
        ...

    def note(self, rows: Sequence[Row], ids_R: Tensor) -> None:
        """Remembers the ids, int64, that were chosen for rows."""
        ...

    def forget(self, sequences: Iterable[int]) -> None:
        """Sequences that have ended need not be known."""
        ...

    def clear(self) -> None:
        """No sequence is known any more."""
        ...


class HostIds(dict[int, int]):
    """Ids by sequence. Implements LastIds."""

    def resolve(self, token_ids_T: Tensor) -> Tensor:
        return token_ids_T

    def note(self, rows: Sequence[Row], ids_R: Tensor) -> None:
        self.update(zip([row.sequence for row in rows], ids_R.tolist(), strict=True))

    def forget(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self.pop(sequence, None)


class DeviceIds:
    """Ids in a tensor of fixed address, a place for each of so many sequences. Implements LastIds.

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

    def note(self, rows: Sequence[Row], ids_R: Tensor) -> None:
        places = torch.tensor([self.place(row.sequence) for row in rows], dtype=torch.long)
        self.put(to_device(places, self._device), ids_R)

    def put(self, places_R: Tensor, ids_R: Tensor) -> None:
        """Remembers ids at their places."""
        self._ids_P.index_copy_(0, places_R, ids_R)

    def forget(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            if (place := self._places.pop(sequence, None)) is not None:
                self._free.append(place)

    def clear(self) -> None:
        self.forget([*self._places])
