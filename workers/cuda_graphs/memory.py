"""The numbers that a step brings to a device: one copy, to the same place each time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longleaf.kernels.backend import Numbers
from workers.host_copies import pinned

ALIGNED = 16
"""Fields begin at multiples of so many numbers, 128 bytes: kernels are compiled anew for addresses that are odd."""


def laid_out(sizes: Sequence[int]) -> list[slice]:
    """Places of fields of such sizes, one after the other."""
    places: list[slice] = []
    end = 0
    for size in sizes:
        start = end + -end % ALIGNED
        end = start + size
        places.append(slice(start, end))
    return places


class StepMemory:
    """Room for N numbers, int64, on a device, and twice on the host: while one is on its way the other is filled."""

    def __init__(self, num_numbers: int, device: str) -> None:
        self.there_N = torch.zeros(num_numbers, dtype=torch.long, device=device)
        self._hosts = [pinned(num_numbers, dtype=torch.long, device=device) for _ in range(2)]
        self.turn = 0
        """Which of the two is filled."""

    def host(self) -> Numbers:
        """Memory of the host to be filled. What was sent from it, the second to last copy, must have arrived."""
        return self._hosts[self.turn].numpy()

    def send(self, num_numbers: int) -> None:
        """Begins to copy the first of what was filled, behind what the device was told before."""
        host: Tensor = self._hosts[self.turn]
        self.there_N[:num_numbers].copy_(host[:num_numbers], non_blocking=True)
        self.turn = 1 - self.turn
