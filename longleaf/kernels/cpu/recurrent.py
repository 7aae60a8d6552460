"""The compiled layers with a recurrent state on CPU ranks, from recurrent.c: rows of many sequences in one call.

Shape letters: T rows of all sequences, C channels of the convolution, K inputs that it keeps, H heads, D numbers of a
key, V of a value, S slots of states, P parts.
"""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longleaf import c_extension

SOURCE = Path(__file__).with_name("recurrent.c")
# no fast-math: exponentials have exact parts, and non-finite numbers must propagate
FLAGS = ("-O3", "-march=native")
LANES, MAX_KERNEL = 16, 8
"""Divisor of all dimensions, and the largest number of inputs of a convolution, as in recurrent.c."""
NO_SLOT = -1
MIN_WORK = 1 << 16
"""Numbers of states, times rows, from which several threads are faster than one."""


class RecurrentPart(NamedTuple):
    """Adjacent rows of a sequence."""

    start: int
    end: int
    source: int
    """Slot of the state before them; NO_SLOT where the sequence begins."""
    target: int
    """Slot for the state after them; NO_SLOT: none."""


class Convolution(NamedTuple):
    """The causal convolution of a layer, followed by SiLU."""

    weights_KC: Tensor
    bias_C: Tensor | None


class NativeRecurrence:
    """Convolutions and recurrences, on torch's threads. Tensors are in CPU memory, float32, pools are contiguous,
    and callers check the sizes with `can_run`. Parts are computed in order; states are read and written in the pools.
    Raises ValueError if shapes do not match.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self._delta_rule = library.longleaf_delta_rule
        self._delta_rule.argtypes = [pointer] * 11 + [long] * 10 + [pointer, long]
        self._scan = library.longleaf_scan
        self._scan.argtypes = [pointer] * 12 + [long] * 9 + [pointer, long]
        self._scratch_size = library.longleaf_recurrent_scratch
        self._scratch_size.argtypes, self._scratch_size.restype = [long] * 2, long
        self._delta_rule.restype = self._scan.restype = None
        self._start_threads = c_extension.find_openmp() or 0

    @staticmethod
    def load() -> "NativeRecurrence":
        """The functions, compiled at the first call on this kind of processor. Raises OSError, for instance without a C
        compiler.
        """
        return NativeRecurrence(c_extension.load(SOURCE, FLAGS))

    @staticmethod
    def can_run(num_channels: int, kernel_size: int, key_dim: int, value_dim: int) -> bool:
        """Whether layers of these sizes can be computed."""
        is_even = all(size > 0 and size % LANES == 0 for size in (num_channels, key_dim, value_dim))
        return is_even and 1 < kernel_size <= MAX_KERNEL

    def delta_rule(
        self,
        x_TC: Tensor,
        convolution: Convolution,
        pools: tuple[Tensor, Tensor],
        parts_P4: Tensor,
        decays: Tensor,
        steps_TH: Tensor,
        key_heads: int,
    ) -> Tensor:
        """The results [T, H, V] of the gated delta rule. Channels are the queries and keys of `key_heads` heads, which
        are normalized, and the values. `pools` are inputs of the convolution [S, C, K], which may be bfloat16 if `x_TC`
        has such numbers, and states [S, H, D, V]. `decays` are [T, H], or [T, H, D] with one for each number of a key.
        A part is a row of int64 `parts_P4`, see `parts_tensor`.
        """
        _, heads, key_dim, value_dim = pools[1].shape
        lead = (len(x_TC), heads)
        _check("channels", x_TC.shape[1], 2 * key_heads * key_dim + heads * value_dim)
        _check("decays", decays.shape, lead if decays.dim() == 2 else (*lead, key_dim))
        _check("steps", steps_TH.shape, lead)
        out_THV = x_TC.new_empty(*lead, value_dim)
        tensors = (x_TC, *convolution, *pools, parts_P4, decays, steps_TH, out_THV)
        self._call(self._delta_rule, tensors, (key_heads, heads, key_dim, value_dim, decays[0, 0].numel()))
        return out_THV

    def scan(
        self,
        x_TC: Tensor,
        convolution: Convolution,
        pools: tuple[Tensor, Tensor],
        parts_P4: Tensor,
        decays_TH: Tensor,
        steps_TH: Tensor,
        skips_H: Tensor,
        num_groups: int,
    ) -> Tensor:
        """The results [T, H, V] of the scan of Mamba-2. Channels are the values, and the keys and queries of
        `num_groups` groups of heads. `pools` are as for `delta_rule`, but states are [S, H, V, D]. The state
        is multiplied by `decays_TH`, values by `steps_TH`, and values times `skips_H` are added to the results.
        """
        _, heads, value_dim, key_dim = pools[1].shape
        lead = (len(x_TC), heads)
        _check("channels", x_TC.shape[1], 2 * num_groups * key_dim + heads * value_dim)
        _check("decays", decays_TH.shape, lead)
        _check("steps", steps_TH.shape, lead)
        _check("skips", skips_H.shape, (heads,))
        out_THV = x_TC.new_empty(*lead, value_dim)
        tensors = (x_TC, *convolution, *pools, parts_P4, decays_TH, steps_TH, skips_H, out_THV)
        self._call(self._scan, tensors, (num_groups, heads, key_dim, value_dim))
        return out_THV

    def _call(
        self,
        function: Callable[..., None],
        tensors: Sequence[Tensor | None],
        sizes: tuple[int, int, int, int, *tuple[int, ...]],
    ) -> None:
        """Calls a function with scratch memory. `tensors` begin with the rows, the weights and bias of the convolution,
        the pools, and the parts.
        """
        contiguous = [None if each is None else each.contiguous() for each in tensors]
        x_TC, weights_KC, _, conv_pool, pool, parts_P4, *_ = contiguous
        if conv_pool is not tensors[3] or pool is not tensors[4]:
            raise ValueError("pools are written, and must be contiguous")
        assert x_TC is not None
        assert weights_KC is not None
        assert conv_pool is not None
        assert parts_P4 is not None
        (num_rows, num_channels), (_, heads, key_dim, value_dim, *_) = x_TC.shape, sizes
        kernel_size = conv_pool.shape[2]
        _check("weights", weights_KC.shape, (kernel_size, num_channels))
        _check("inputs", conv_pool.shape[1:], (num_channels, kernel_size))
        is_large = num_rows * heads * key_dim * value_dim >= MIN_WORK and self._start_threads
        threads = torch.get_num_threads() if is_large else 1
        scratch_size = self._scratch_size(key_dim, value_dim)
        mixed_TC, scratch = torch.empty_like(x_TC), x_TC.new_empty(threads * scratch_size)
        places = [None if each is None else each.data_ptr() for each in (*contiguous, mixed_TC, scratch)]
        is_bfloat16 = conv_pool.dtype == torch.bfloat16
        shape = (len(parts_P4), num_channels, kernel_size, *sizes, scratch_size, is_bfloat16)
        function(*places, *shape, self._start_threads, threads)


def _check(name: str, found: int | Sequence[int], wanted: int | Sequence[int]) -> None:
    """Raises ValueError for a wrong shape: the kernels would read other memory."""
    if found != wanted:
        raise ValueError(f"{name}: {found} instead of {wanted}")


def parts_tensor(parts: Sequence[RecurrentPart]) -> Tensor:
    """Parts as the kernels read them, int64 [P, 4]. The parts of a sequence must be in order."""
    return torch.tensor(parts, dtype=torch.long).view(-1, 4)
