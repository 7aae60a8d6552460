"""The last token of each sequence, which is the input of its next row and not part of the plan.

On a CPU, a token is available to the rank at once. On another device, the token stays in device memory: the host
does not wait for it, and refers to it by its place.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from longleaf.rank_protocol.step import Row
from workers.host_copies import to_device
from workers.sampling.acceptance import NOT_REACHED, accepted_ids, drafts_of

PADDING_ROW = 0
"""The place for rows without a sequence."""
ANY = 0
"""The last id of a sequence that has no token because its logits are not finite. Ranks use it until the sequence is
released.
"""


class LastTokens(Protocol):
    """Stores the last token of each sequence."""

    def __getitem__(self, sequence: int, /) -> int:
        """The id, or its placeholder among token ids."""
        ...

    def resolve(self, token_ids_T: Tensor) -> Tensor:
        """Ids [T], int64, with placeholders replaced by the ids."""
        ...

    def record(self, rows: Sequence[Row], chosen_N: Tensor) -> None:
        """Stores the last reached id of each row. `chosen_N` holds the reported ids of all positions, int64."""
        ...

    def forget(self, sequences: Iterable[int]) -> None:
        """Drops sequences that have ended."""
        ...

    def clear(self) -> None:
        """Drops all sequences."""
        ...


class HostIds(dict[int, int]):
    """Ids by sequence. Implements LastTokens."""

    def resolve(self, token_ids_T: Tensor) -> Tensor:
        return token_ids_T

    def record(self, rows: Sequence[Row], chosen_N: Tensor) -> None:
        for row, ids in zip(rows, accepted_ids(rows, chosen_N.tolist()), strict=True):
            self[row.sequence] = max(ids[-1], ANY)

    def forget(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self.pop(sequence, None)


class DeviceIds:
    """Ids in a tensor at a fixed address, with one place for each of `num_sequences` sequences. Implements LastTokens.

    The placeholder of a place among token ids is the negative number -1 - place.
    """

    def __init__(self, num_sequences: int, device: str) -> None:
        self._device = device
        self._ids_P = torch.zeros(num_sequences + 1, dtype=torch.long, device=device)
        self._free = list(range(num_sequences, PADDING_ROW, -1))
        self._places: dict[int, int] = {}

    def __getitem__(self, sequence: int) -> int:
        return -1 - self._places[sequence]

    def place(self, sequence: int) -> int:
        """The place of a sequence's last id. It is assigned on first use."""
        if sequence not in self._places:
            self._places[sequence] = self._free.pop()
        return self._places[sequence]

    def resolve(self, token_ids_T: Tensor) -> Tensor:
        places_T = (-1 - token_ids_T).clamp_(min=PADDING_ROW)
        return torch.where(token_ids_T < 0, self._ids_P[places_T], token_ids_T)

    def record(self, rows: Sequence[Row], chosen_N: Tensor) -> None:
        numbers = [self.places(rows)]
        if len(numbers[0]) > len(rows):
            numbers.append(drafts_of(rows)[1])
        self.put(*to_device(torch.tensor(numbers, dtype=torch.long), self._device), chosen_N=chosen_N)

    def places(self, rows: Iterable[Row]) -> list[int]:
        """The place of each position of the rows."""
        return [self.place(row.sequence) for row in rows for _ in range(1 + len(row.draft_ids))]

    def put(self, places_N: Tensor, numbers_N: Tensor | None = None, *, chosen_N: Tensor) -> None:
        """Stores the last reached id of each sequence at its place. `numbers_N` is as in `DraftRows`; None: each
        position is the only one of its sequence.
        """
        ids_N = chosen_N.clamp(min=ANY)
        if numbers_N is None:
            self._ids_P.index_copy_(0, places_N, ids_N)
            return
        is_reached_N = chosen_N != NOT_REACHED
        is_followed_N = (is_reached_N & (numbers_N > 0)).roll(-1)  # the first position follows no other
        self._ids_P.index_copy_(0, torch.where(is_reached_N & ~is_followed_N, places_N, PADDING_ROW), ids_N)

    def forget(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            if (place := self._places.pop(sequence, None)) is not None:
                self._free.append(place)

    def clear(self) -> None:
        self.forget([*self._places])
