"""The forward pass of one step, and its attention handles: the meaning of attention in prefill and in decode.

Every layer takes the same four steps: all ranks get the queries, each rank attends to the keys it owns, the partials
are merged, and the model continues with the merged output. Where that moves fewer bytes, prefill gathers keys instead:
see `workers.step.gathered_prefill`. Layers whose keys are replicated on every rank merge nothing: see
`workers.step.windows`. The mode of a layer is given by its value of `workers.step.layers`.
"""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from longleaf.attention import Partial, add_sink
from longleaf.attention.masks import Reads
from longleaf.comm import Comm
from longleaf.kernels.backend import Backend
from longleaf.merge import CountedMerge
from longleaf.rank_protocol.group_messages import MergeTiming
from workers.kv_cache.slots import KvPool
from workers.model.hook import LayerCall
from workers.model.mixers import Mix, SequenceMixer
from workers.model.model import Model
from workers.step.attention_attribution import AttributionAccumulator
from workers.step.draft_rollback import RecordKv, StoredKv
from workers.step.inputs import Inputs
from workers.step.layers import ChunkLayer, Gathered, Replicated, Replicating, RowLayer, Sharded
from workers.step.states import StateRows, StateStep


class PrefillDone(Exception):
    """Ends a prefill forward pass once the last keys and states are stored: later outputs are not needed."""


class Peers:
    """The ranks of an epoch. At world size 1 `comm` and `merge` are None, and exchanges return their input."""

    def __init__(
        self,
        device: str,
        comm: Comm | None = None,
        merge: CountedMerge | None = None,
        timings: Sequence[MergeTiming] = (),
    ) -> None:
        """`timings` are those on which the choice of the merge is based, if it was chosen automatically."""
        self.device = device
        self.comm = comm
        self.merge = merge
        self.timings = tuple(timings)
        self.rank, self.world_size = (comm.rank, comm.world_size) if comm else (0, 1)

    def broadcast(self, ids_T: Tensor) -> Tensor:
        """The ids that rank 0 passes. A collective: all ranks call it at the same time."""
        return self.comm.broadcast(ids_T) if self.comm else ids_T

    def smallest(self, number: int) -> int:
        """The smallest of the numbers of all ranks. A collective."""
        return int(self.comm.all_gather(torch.tensor([number], device=self.device)).min()) if self.comm else number

    def agree(self, is_so: bool) -> bool:
        """Whether `is_so` is true on all ranks. A collective."""
        if self.comm is None:
            return is_so
        votes = self.comm.all_gather(torch.tensor([is_so], dtype=torch.long, device=self.device))
        return is_so and bool(votes.min())

    def pop_merge_bytes(self) -> int:
        """Bytes merged since the last call. A replayed step counts nothing."""
        return self.merge.pop_num_bytes() if self.merge else 0


class LocalAttention:
    """Attention of queries over this rank's pool."""

    def __init__(self, pool: KvPool, backend: Backend, peers: Peers) -> None:
        self.pool = pool
        self.backend = backend
        self._has_sink = peers.rank == 0

    def __call__(self, layer: int, q_THD: Tensor, reads: Reads, call: LayerCall) -> Partial:
        """This rank's contribution to a merge; only rank 0 adds the sink."""
        partial = self.over_pool(layer, q_THD, reads, call)
        return with_sink(partial, call) if self._has_sink else partial

    def over_pool(self, layer: int, q_THD: Tensor, reads: Reads, call: LayerCall) -> Partial:
        """The partial of reads from the pool, without the sink."""
        return self.pool.attend(self.backend, layer, q_THD, reads, call.scale, call.softcap)


def with_sink(partial: Partial, call: LayerCall) -> Partial:
    return partial if call.sink_H is None else add_sink(partial, call.sink_H)


def joined(backend: Backend, *parts: Partial) -> Partial:
    """The partial of rows over all keys, given partials over disjoint parts of the keys."""
    return backend.fold(torch.stack([backend.pack(part, torch.float32) for part in parts]))


class DecodeStep:
    """Replicated rows: every rank computes the same queries and gets the same merged output. Layers whose keys are
    replicated on every rank merge nothing.
    """

    def __init__(
        self,
        inputs: Inputs[RowLayer],
        pool: KvPool,
        backend: Backend,
        peers: Peers,
        accumulator: AttributionAccumulator | None = None,
        record: RecordKv | None = None,
    ) -> None:
        """`accumulator` counts the attention of rows that request attribution, if any do; `record` records the
        stored keys and values, if they may have to be rolled back.
        """
        self._layers = inputs.layers
        self._local = LocalAttention(pool, backend, peers)
        self._peers = peers
        self._accumulator = accumulator
        self._record = record

    def attend(self, layer: int, q_THD: Tensor, k_KTD: Tensor, v_KTV: Tensor, call: LayerCall) -> Tensor:
        work, local = self._layers[layer], self._local
        local.pool.store(local.backend, layer, work.slots_T, k_KTD, v_KTV)
        if self._record is not None:
            self._record(layer, StoredKv(work.slots_T, k_KTD, v_KTV))
        match work:
            case Sharded():
                partial = local(layer, q_THD, work.reads, call)
                merged = self._peers.merge.to_all(partial) if self._peers.merge else partial
                if self._accumulator is not None:
                    self._accumulator.add(layer, q_THD, merged.lse_TH, call)
                return merged.out_THD
            case Replicated():
                return with_sink(local.over_pool(layer, q_THD, work.reads, call), call).out_THD


class PrefillStep:
    """Sharded rows: each rank computes its piece. Depending on the layer, ranks gather the queries and return every row
    to its owner, gather the keys before the pieces, or gather only the new keys that are in a window.
    """

    def __init__(
        self,
        inputs: Inputs[ChunkLayer],
        pool: KvPool,
        backend: Backend,
        peers: Peers,
        last_layer: int,
        last_mixer: int | None = None,
        mix: Mix | None = None,
    ) -> None:
        """`last_mixer`: the mixer that computes rows after the last attention layer, if any; `mix` computes them."""
        self._last_mixer = last_mixer
        self._mix = mix
        self._inputs = inputs
        self._local = LocalAttention(pool, backend, peers)
        self._peers = peers
        self._last_layer = last_layer
        self._has_finite_keys = torch.tensor(True)

    def attend(self, layer: int, q_THD: Tensor, k_KTD: Tensor, v_KTV: Tensor, call: LayerCall) -> Tensor:
        self._record_finite(layer, k_KTD, v_KTV)
        match self._inputs.layers[layer]:
            case Sharded() as work:
                self._store(layer, work.slots_T, k_KTD, v_KTV)
                return self._over_shards(layer, work, q_THD, call)
            case Gathered() as work:
                self._store(layer, work.slots_T, k_KTD, v_KTV)
                keys, values = self._local.pool.stored(layer, work.slots_T, k_KTD, v_KTV)
                own = self._local.backend.attend(q_THD, keys, values, work.own_reads, call.scale, call.softcap)
                before = self._over_past(layer, work, q_THD, call)
                return with_sink(joined(self._local.backend, before, own) if before else own, call).out_THD
            case Replicating() as work:
                return self._in_window(layer, work, q_THD, k_KTD, v_KTV, call)

    def mix(self, mixer: SequenceMixer, hidden_TF: Tensor) -> Tensor:
        """Computes rows in a mixer. Raises PrefillDone in the last one, if no attention follows."""
        assert self._mix is not None
        found_TF = self._mix(mixer, hidden_TF)
        if mixer.layer == self._last_mixer:
            self._has_finite_keys = found_TF[: self._inputs.num_own_tokens].isfinite().all()
            raise PrefillDone
        return found_TF

    def _over_shards(self, layer: int, work: Sharded, q_THD: Tensor, call: LayerCall) -> Tensor:
        """Gathers the queries and returns the merged rows to their owners."""
        comm, merge = self._peers.comm, self._peers.merge
        if comm is None or merge is None:
            return self._local(layer, q_THD, work.reads, call).out_THD
        rows_THD = comm.all_gather(q_THD).flatten(0, 1)
        return merge.to_owner(self._local(layer, rows_THD, work.reads, call)).out_THD

    def _over_past(self, layer: int, work: Gathered, q_THD: Tensor, call: LayerCall) -> Partial | None:
        """The own rows over the gathered keys; None when no keys are before any piece."""
        if not len(work.past_L):
            return None
        keys, values = self._gather(layer, self._local.pool.take(layer, work.past_L))
        return self._local.backend.attend(q_THD, keys, values, work.past_reads, call.scale, call.softcap)

    def _in_window(
        self, layer: int, work: Replicating, q_THD: Tensor, k_KTD: Tensor, v_KTV: Tensor, call: LayerCall
    ) -> Tensor:
        """Attention where each rank holds all keys that later tokens will see."""
        local = self._local
        packed_SKC = local.pool.pack(layer, k_KTD[:, work.rows_L], v_KTV[:, work.rows_L])
        keys, values = self._gather(layer, packed_SKC)
        self._store(layer, work.slots_S, keys[:, work.index_S], values[:, work.index_S])
        past = local.over_pool(layer, q_THD, work.pool_reads, call)
        before = local.backend.attend(q_THD, keys, values, work.gathered_reads, call.scale, call.softcap)
        own = local.backend.attend(q_THD, k_KTD, v_KTV, work.own_reads, call.scale, call.softcap)
        return with_sink(joined(local.backend, past, before, own), call).out_THD

    def _gather(self, layer: int, share_SKC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all ranks' shares, concatenated by rank."""
        if self._peers.comm and len(share_SKC):
            share_SKC = self._peers.comm.all_gather(share_SKC).flatten(0, 1)
        return self._local.pool.split(layer, share_SKC)

    def _store(self, layer: int, slots_T: Tensor, k_KTD: Tensor, v_KTV: Tensor) -> None:
        """Stores keys and values. Raises PrefillDone in the last layer, if no mixer follows."""
        self._local.pool.store(self._local.backend, layer, slots_T, k_KTD, v_KTV)
        if layer == self._last_layer and self._last_mixer is None:
            raise PrefillDone

    def _record_finite(self, layer: int, k_KTD: Tensor, v_KTV: Tensor) -> None:
        """Records whether the last layer's keys and values of the own piece are finite. A non-finite value in an
        earlier layer propagates to the last one, since each row sees itself.
        """
        if layer == self._last_layer:
            num_tokens = self._inputs.num_own_tokens
            own = (k_KTD[:, :num_tokens], v_KTV[:, :num_tokens])
            self._has_finite_keys = torch.stack([numbers.isfinite().all() for numbers in own]).all()

    def has_finite_keys(self) -> Tensor:
        """Whether the keys and values of the whole chunk are finite, on all ranks. A collective: all ranks call it at
        the same time, after the forward pass.
        """
        if self._peers.comm is None:
            return self._has_finite_keys
        return self._peers.comm.all_gather(self._has_finite_keys.long()[None]).all()


class ModelRunner:
    """Runs the model over the pool of this rank, together with the other ranks of an epoch."""

    def __init__(self, model: Model, pool: KvPool, backend: Backend, peers: Peers) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self._peers = peers

    def store_chunk(self, inputs: Inputs[ChunkLayer]) -> Tensor:
        """Stores the keys and states of a chunk. Returns whether they are finite, on all ranks."""
        model = self.model
        mix = self._mix(inputs.states, self._peers.comm)
        step = PrefillStep(inputs, self.pool, self.backend, self._peers, model.last_layer, model.last_mixer, mix)
        with contextlib.suppress(PrefillDone):
            model.run(
                step.attend, inputs.token_ids_T, inputs.positions_T, inputs.ropes, has_own_rows=True, mix=step.mix
            )
        return step.has_finite_keys()

    def _mix(self, rows: StateRows | None, comm: Comm | None = None) -> Mix | None:
        """Computes the rows of a step in mixers, if the model has any."""
        states = self.pool.states
        return None if rows is None or states is None else StateStep(rows, states, self.pool.device, comm).mix

    def logits(
        self,
        inputs: Inputs[RowLayer],
        record: RecordKv | None = None,
        accumulator: AttributionAccumulator | None = None,
    ) -> Tensor | None:
        """Runs decode rows. Rank 0 returns the logits [R, V] of the R requested rows, other ranks None."""
        step = DecodeStep(inputs, self.pool, self.backend, self._peers, accumulator, record)
        is_first = self._peers.rank == 0
        rows_R = inputs.sample_rows_R if is_first or self.model.exchange is not None else None
        mix = self._mix(inputs.states)
        logits_RV = self.model.run(step.attend, inputs.token_ids_T, inputs.positions_T, inputs.ropes, rows_R, mix=mix)
        return logits_RV if is_first else None
