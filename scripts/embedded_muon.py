"""The Muon optimizer (Jordan et al. 2024) in float32: torch's own works in bfloat16, which CPUs emulate slowly."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, as published; five steps bring singular values near one."""
STEPS = 5


def orthogonalise(matrix: Tensor) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T of `matrix`, by Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalised, scaled to the usual size of AdamW's, with decoupled weight decay."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates the matrices that have a gradient; takes no closure."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalise(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)
