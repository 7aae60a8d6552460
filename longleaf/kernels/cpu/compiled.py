"""CPU backend: compiled kernels for few rows, for their products with weights, for recurrent states and for the fold,
torch's flash kernel for many rows."""

from collections.abc import Sequence

from torch import Tensor

from longleaf.attention.masks import Read
from longleaf.attention.partial import Partial
from longleaf.kernels.backend import Int8Layer, check_shapes
from longleaf.kernels.cpu.block_attribution import NativeBlockAttribution
from longleaf.kernels.cpu.decode import NativeDecode
from longleaf.kernels.cpu.flash import TorchFlashBackend
from longleaf.kernels.cpu.fold import NativeFold
from longleaf.kernels.cpu.linear import NativeLinear
from longleaf.kernels.cpu.recurrent import NativeRecurrence


class NativeBackend(TorchFlashBackend):
    """Like `TorchFlashBackend`, but faster in decode. Compiled at first use on this kind of processor; raises OSError,
    with the reason, on failure."""

    name = "compiled"

    def __init__(self) -> None:
        super().__init__()
        self.product = NativeLinear.load()
        """Products with the weights of a model."""
        self.recurrence = NativeRecurrence.load()
        """Layers with recurrent states."""
        self._decode = NativeDecode.load()
        self._fold = NativeFold.load()
        self.add_shares = NativeBlockAttribution.load()

    def attend(
        self,
        q_THD: Tensor,
        k_KSD: Tensor,
        v_KSV: Tensor,
        reads: Sequence[Read],
        scale: float,
        softcap: float | None = None,
    ) -> Partial:
        if self._decode.can_run(q_THD, k_KSD, v_KSV):
            check_shapes(q_THD, k_KSD, v_KSV)
            return self._decode(q_THD, k_KSD, v_KSV, reads, scale, softcap)
        return super().attend(q_THD, k_KSD, v_KSV, reads, scale, softcap)

    def attend_int8(
        self, q_THD: Tensor, layer: Int8Layer, reads: Sequence[Read], scale: float, softcap: float | None = None
    ) -> Partial:
        if self._decode.can_run_int8(q_THD, layer):
            return self._decode.over_int8(q_THD, layer, reads, scale, softcap)
        return super().attend_int8(q_THD, layer, reads, scale, softcap)

    def fold(self, packed_NTHC: Tensor) -> Partial:
        if self._fold.can_run(packed_NTHC):
            return self._fold(packed_NTHC)
        return super().fold(packed_NTHC)
