"""The numbers that a step sends to a device: one copy, always to the same address."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longleaf.kernels.backend import Numbers
from workers.host_copies import pinned

ALIGNED = 16
"""Alignment of fields, in numbers (128 bytes): Triton compiles a separate kernel for unaligned addresses."""


def laid_out(sizes: Sequence[int]) -> list[slice]:
    """The slices of consecutive aligned fields of these sizes."""
    places: list[slice] = []
    end = 0
    for size in sizes:
        start = end + -end % ALIGNED
        end = start + size
        places.append(slice(start, end))
    return places


class StepMemory:
    """N int64 numbers on a device, and two buffers on the host: one is filled while the other is being copied."""

    def __init__(self, num_numbers: int, device: str) -> None:
        self.device_N = torch.zeros(num_numbers, dtype=torch.long, device=device)
        self._hosts = [pinned(num_numbers, dtype=torch.long, device=device) for _ in range(2)]
        self.turn = 0
        """The index of the host buffer that is filled next."""

    def host(self) -> Numbers:
        """The host buffer to fill. The copy before the last, which used the same buffer, must have finished."""
        return self._hosts[self.turn].numpy()

    def send(self, num_numbers: int) -> None:
        """Starts the copy of the first numbers of the filled buffer, after earlier work of the stream."""
        host: Tensor = self._hosts[self.turn]
        self.device_N[:num_numbers].copy_(host[:num_numbers], non_blocking=True)
        self.turn = 1 - self.turn
