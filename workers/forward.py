"""The handles that one step carries through the model: what attention means in prefill and in decode.

Every forward pass is the same four moves in each layer: the queries are known to every rank, each rank attends to the
keys it owns, the partials are merged, and the model goes on with the merged output.
"""

from typing import Never

from torch import Tensor

from longleaf.attention.kernels import Kernel
from longleaf.comm import Comm
from longleaf.tree import Merge
from workers.cache import Pool
from workers.hook import LayerCall
from workers.inputs import Inputs


class PrefillDone(Exception):
    """Ends a prefill forward once the last layer's keys are stored: nobody asks for what would follow."""


class Exchange:
    """What ranks of a group say to each other in a forward pass."""

    def __init__(self, comm: Comm, merge: Merge) -> None:
        self.comm = comm
        self.merge = merge


class DecodeStep:
    """Replicated rows: every rank computes the same queries and gets the same merged output."""

    def __init__(self, inputs: Inputs, pool: Pool, kernel: Kernel, exchange: Exchange | None) -> None:
        self._inputs = inputs
        self._pool = pool
        self._kernel = kernel
        self._exchange = exchange

    def attend(self, layer: int, q_THD: Tensor, k_KTD: Tensor, v_KTD: Tensor, call: LayerCall) -> Tensor:
        pool, inputs = self._pool, self._inputs
        pool.store(layer, inputs.slots_T, k_KTD, v_KTD)
        partial = self._kernel(q_THD, pool.keys[layer], pool.values[layer], inputs.reads[call.window], call.scale)
        return (self._exchange.merge.merge(partial) if self._exchange else partial).out_THD


class PrefillStep:
    """Own rows: each rank computes its piece, queries are gathered, every row goes back to its owner."""

    def __init__(self, inputs: Inputs, pool: Pool, kernel: Kernel, exchange: Exchange | None, last_layer: int) -> None:
        self._inputs = inputs
        self._pool = pool
        self._kernel = kernel
        self._exchange = exchange
        self._last_layer = last_layer

    def attend(self, layer: int, q_THD: Tensor, k_KTD: Tensor, v_KTD: Tensor, call: LayerCall) -> Tensor:
        pool, inputs = self._pool, self._inputs
        pool.store(layer, inputs.slots_T, k_KTD, v_KTD)
        if layer == self._last_layer:
            self._finish()
        exchange = self._exchange
        rows_THD = exchange.comm.all_gather(q_THD).flatten(0, 1) if exchange else q_THD
        partial = self._kernel(rows_THD, pool.keys[layer], pool.values[layer], inputs.reads[call.window], call.scale)
        return (exchange.merge.merge_to_owner(partial) if exchange else partial).out_THD

    def _finish(self) -> Never:
        raise PrefillDone
