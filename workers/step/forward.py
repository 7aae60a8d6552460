"""The handles that one step carries through the model: what attention means in prefill and in decode.

Every forward pass is the same four moves in each layer: the queries are known to every rank, each rank attends to the
keys it owns, the partials are merged, and the model goes on with the merged output. Where it moves fewer bytes, prefill
gathers keys instead: see `workers.step.past`. Layers whose keys lie on every rank merge nothing: see
`workers.step.windows`.
"""

import torch
from torch import Tensor

from longleaf.attention import Partial, add_sink, merge
from longleaf.attention.kernels import Kernel
from longleaf.attention.masks import Reads
from longleaf.comm import Comm
from longleaf.tree import Merge
from workers.keys.cache import Slots
from workers.model.hook import LayerCall
from workers.step.inputs import Inputs
from workers.step.past import Past
from workers.step.windows import Fresh


class PrefillDone(Exception):
    """Ends a prefill forward once the last layer's keys are stored: nobody asks for what would follow."""


class Peers:
    """The other ranks in a forward pass: what can be said to them, and how partials are merged with theirs."""

    def __init__(self, comm: Comm, merge: Merge) -> None:
        self.comm = comm
        self.merge = merge


class LocalAttention:
    """Attention of queries over this rank's pool."""

    def __init__(self, inputs: Inputs, pool: Slots, kernel: Kernel, peers: Peers | None) -> None:
        self.inputs = inputs
        self.pool = pool
        self.kernel = kernel
        self.kv_bytes_read = 0
        """Of all layers so far; what several rows read together counts once."""
        self._has_sink = peers is None or peers.comm.rank == 0

    def __call__(self, layer: int, q_THD: Tensor, call: LayerCall) -> Partial:
        """The partial that this rank gives to a merge; of all ranks the first one adds the sink."""
        partial = self.over_pool(layer, q_THD, self.inputs.reads[layer], call)
        return with_sink(partial, call) if self._has_sink else partial

    def over_pool(self, layer: int, q_THD: Tensor, reads: Reads, call: LayerCall) -> Partial:
        """The partial of some reads from the pool, without the sink."""
        self.kv_bytes_read += reads.num_keys * self.pool.bytes_per_slot(layer)
        return self.pool.attend(self.kernel, layer, q_THD, reads, call.scale, call.softcap)


def with_sink(partial: Partial, call: LayerCall) -> Partial:
    return partial if call.sink_H is None else add_sink(partial, call.sink_H)


class DecodeStep:
    """Replicated rows: every rank computes the same queries and gets the same merged output. Where it holds all keys
    that they see, nothing is merged."""

    def __init__(self, inputs: Inputs, pool: Slots, kernel: Kernel, peers: Peers | None) -> None:
        self._local = LocalAttention(inputs, pool, kernel, peers)
        self._peers = peers

    @property
    def kv_bytes_read(self) -> int:
        """Bytes of this rank's keys and values that were read so far."""
        return self._local.kv_bytes_read

    def attend(self, layer: int, q_THD: Tensor, k_KTD: Tensor, v_KTV: Tensor, call: LayerCall) -> Tensor:
        local = self._local
        window_slots_T = local.inputs.window_slots.get(layer)
        if window_slots_T is not None:
            local.pool.store(layer, window_slots_T, k_KTD, v_KTV)
            return with_sink(local.over_pool(layer, q_THD, local.inputs.reads[layer], call), call).out_THD
        local.pool.store(layer, local.inputs.slots_T, k_KTD, v_KTV)
        partial = local(layer, q_THD, call)
        return (self._peers.merge.to_all(partial) if self._peers else partial).out_THD


class PrefillStep:
    """Own rows: each rank computes its piece. Queries are gathered and every row goes back to its owner, or the keys
    before the pieces are gathered, or only the fresh ones of them, and nothing goes back."""

    def __init__(self, inputs: Inputs, pool: Slots, kernel: Kernel, peers: Peers | None, last_layer: int) -> None:
        self._local = LocalAttention(inputs, pool, kernel, peers)
        self._peers = peers
        self._last_layer = last_layer
        self._has_finite_keys = torch.tensor(True)

    def attend(self, layer: int, q_THD: Tensor, k_KTD: Tensor, v_KTV: Tensor, call: LayerCall) -> Tensor:
        local, peers = self._local, self._peers
        if fresh := local.inputs.fresh.get(layer):
            return self._in_window(layer, fresh, q_THD, k_KTD, v_KTV, call)
        self._look_at(layer, k_KTD, v_KTV)
        k_KTD, v_KTV = local.pool.store(layer, local.inputs.slots_T, k_KTD, v_KTV)
        self._finish_after(layer)
        if peers is None:
            return local(layer, q_THD, call).out_THD
        if past := local.inputs.pasts.get(layer):
            own = local.kernel(q_THD, k_KTD, v_KTV, past.own_reads, call.scale, call.softcap)
            before = self._before(layer, past, q_THD, call, peers.comm)
            return with_sink(merge(before, own) if before else own, call).out_THD
        rows_THD = peers.comm.all_gather(q_THD).flatten(0, 1)
        return peers.merge.to_owner(local(layer, rows_THD, call)).out_THD

    def _before(self, layer: int, past: Past, q_THD: Tensor, call: LayerCall, comm: Comm) -> Partial | None:
        """The own rows over the gathered keys; None when nothing lies before any piece."""
        if not len(past.slots_L):
            return None
        pool = self._local.pool
        gathered_SNKD = comm.all_gather(pool.take(layer, past.slots_L)).flatten(0, 1)
        keys, values = pool.split(layer, gathered_SNKD)
        return self._local.kernel(q_THD, keys, values, past.reads, call.scale, call.softcap)

    def _in_window(
        self, layer: int, fresh: Fresh, q_THD: Tensor, k_KTD: Tensor, v_KTV: Tensor, call: LayerCall
    ) -> Tensor:
        """Attention where each rank holds the keys that are seen later."""
        local, pool = self._local, self._local.pool
        self._look_at(layer, k_KTD, v_KTV)
        packed_SNKD = pool.pack(layer, k_KTD[:, fresh.rows_L], v_KTV[:, fresh.rows_L])
        if self._peers and len(packed_SNKD):
            packed_SNKD = self._peers.comm.all_gather(packed_SNKD).flatten(0, 1)
        keys, values = pool.split(layer, packed_SNKD)
        pool.store(layer, fresh.slots_S, keys[:, fresh.kept_S], values[:, fresh.kept_S])
        self._finish_after(layer)
        past = local.over_pool(layer, q_THD, fresh.pool_reads, call)
        before = local.kernel(q_THD, keys, values, fresh.gathered_reads, call.scale, call.softcap)
        own = local.kernel(q_THD, k_KTD, v_KTV, fresh.own_reads, call.scale, call.softcap)
        return with_sink(merge(merge(past, before), own), call).out_THD

    def _look_at(self, layer: int, k_KTD: Tensor, v_KTV: Tensor) -> None:
        """Notes whether the last layer's keys and values of the own piece are finite. What is not so in a layer before
        shows there, since each row sees itself."""
        if layer == self._last_layer:
            num_tokens = self._local.inputs.num_own_tokens
            own = (k_KTD[:, :num_tokens], v_KTV[:, :num_tokens])
            self._has_finite_keys = torch.stack([numbers.isfinite().all() for numbers in own]).all()

    def has_finite_keys(self) -> Tensor:
        """Whether those of the whole chunk are, on all ranks; all of them ask at the same time, after the forward
        pass."""
        if self._peers is None:
            return self._has_finite_keys
        return self._peers.comm.all_gather(self._has_finite_keys.long()[None]).all()

    def _finish_after(self, layer: int) -> None:
        if layer == self._last_layer:
            raise PrefillDone
