"""Where checks run, and how much they take."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.gpu.ground import LeftOut
from longleaf.attention import Partial, reference
from longleaf.attention.masks import Read
from longleaf.kernels.gpu.backend import TritonKernels, count_multiprocessors
from longleaf.kernels.gpu.launch import Launcher

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""How far attention may be off: 16-bit weights are rounded to the type of the values."""
SCORE_SPREAD = 2.0
FEW = 4
"""Multiprocessors that kernels are launched for off a GPU."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device, and sizes."""

    device: str
    kernels: TritonKernels
    dims: tuple[int, ...]
    num_keys: int
    num_rows: int
    num_prompt: int
    """Tokens that a model reads."""

    def launching(self, launcher: Launcher) -> TritonKernels:
        """The same kernels, launched in another way."""
        return TritonKernels(self.num_multiprocessors, launcher)

    @property
    def num_multiprocessors(self) -> int:
        return count_multiprocessors() if self.is_gpu else FEW

    def drawn(self, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same numbers on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(dtype).to(self.device)

    @property
    def is_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @contextmanager
    def without_synchronization(self) -> Generator[None]:
        """On a GPU it is an error to wait for it in here."""
        if not self.is_gpu:
            yield
            return
        torch.cuda.synchronize(self.device)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def needs_gpu(self) -> None:
        if not self.is_gpu:
            raise LeftOut("needs a GPU")


def flash_on(place: Place) -> Place:
    """The same place with flash kernels for many rows. Raises LeftOut, with the reason, where there are none."""
    place.needs_gpu()
    try:
        from longleaf.kernels.gpu.flash import FlashKernels

        return replace(place, kernels=FlashKernels.load())
    except (ImportError, RuntimeError) as error:
        raise LeftOut(f"no flash kernels: {error}") from error


def on_gpu(device: str) -> Place:
    """Real sizes."""
    torch.cuda.set_device(device)
    return Place(device, TritonKernels.load(), (64, 80, 96, 112, 128, 192, 256), 20_000, 40, 700)


def scale_of(q_THD: Tensor) -> float:
    """A scale with the same spread of scores for every dim."""
    return SCORE_SPREAD * q_THD.shape[2] ** -0.5


def seen_through(reads: list[Read], num_rows: int, num_slots: int, device: str) -> Tensor:
    """[T, S], true where a row sees the key in a slot."""
    seen_TS = torch.zeros(num_rows, num_slots, dtype=torch.bool, device=device)
    for read in reads:
        offset, window = read.mask
        rows, slots = (torch.arange(n, device=device) for n in (len(range(*read[:2])), len(range(*read[2:4]))))
        distance_QS = offset + rows[:, None] - slots
        seen_TS[read.row_start : read.row_end, read.slot_start : read.slot_end] |= (distance_QS >= 0) & (
            distance_QS < window
        )
    return seen_TS


def wanted(q_THD: Tensor, k_KSD: Tensor, v_KSV: Tensor, reads: list[Read], softcap: float | None = None) -> Partial:
    """The partial in float64, a key head at a time; rows that see no key may have any value."""
    seen_TS = seen_through(reads, len(q_THD), k_KSD.shape[1], str(q_THD.device))
    unseen_S11 = ~seen_TS.any(dim=0)[:, None, None]
    group = q_THD.shape[1] // len(k_KSD)
    parts = [
        reference.attend(
            q_THD[:, head * group : (head + 1) * group],
            *(t[head, :, None].masked_fill(unseen_S11, 0) for t in (k_KSD, v_KSV)),
            seen_TS,
            scale_of(q_THD),
            softcap=softcap,
        )
        for head in range(len(k_KSD))
    ]
    return Partial(torch.cat([part.out_THD for part in parts], 1), torch.cat([part.lse_TH for part in parts], 1))


def assert_close(found: Partial, right: Partial, tolerance: float) -> None:
    for a, b in zip((found.out_THD, found.lse_TH), (right.out_THD, right.lse_TH), strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


def assert_same_bits(found: Tensor, right: Tensor) -> None:
    assert found.dtype == right.dtype and found.shape == right.shape
    assert torch.equal(found.contiguous().cpu().view(torch.uint8), right.contiguous().cpu().view(torch.uint8))
