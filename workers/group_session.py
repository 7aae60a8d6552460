"""The state of a rank within one epoch: its peers, the cached blocks and the sequences. Runners execute its steps."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longleaf.attention import Partial
from longleaf.comm import Groups
from longleaf.config import EngineConfig
from longleaf.kernels.backend import AttributionBackend, Backend
from longleaf.merge import CountedMerge, PartialCodec, choose_merge, make_merge
from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.group_messages import KvLayout, MergeTiming
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.snapshots import Save
from longleaf.rank_protocol.step import Decode, Move, Prefill, Restore, StepPlan, StepResult
from workers.cuda_graphs.graphs import Graphs
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.pools import sharded_layers, windowed_layers
from workers.kv_cache.slots import KvPool
from workers.kv_io.kv_io import KvIo
from workers.model.model import Model
from workers.rank_runtime import StepHandle, done
from workers.runners.decode import DecodeRunner
from workers.runners.kv_restore import restore
from workers.runners.kv_transfer import move
from workers.runners.prefill import PrefillRunner
from workers.runners.verification import Verifier
from workers.sampling.device_sampler import DeviceSampler
from workers.sampling.sampler import CpuSampler
from workers.step.draft_rollback import DraftRollback
from workers.step.forward import ModelRunner, Peers
from workers.step.gathered_prefill import PastBuilder
from workers.step.inputs import InputBuilder
from workers.step.last_tokens import LastTokens
from workers.step.states import StateBuilder
from workers.step.windows import WindowBuilder

log = logging.getLogger("longleaf.rank")  # messages logged while a rank joins are shown to users


@dataclass(frozen=True, slots=True)
class RankResources:
    """The resources of a rank, which outlast epochs."""

    config: EngineConfig
    device: str
    model: Model
    pool: KvPool
    backend: Backend
    sampler: CpuSampler | DeviceSampler
    last_ids: LastTokens
    kv_io: KvIo
    graphs: Graphs | None = None
    """None where nothing is captured."""


class GroupSession:
    """The state of a rank in one epoch. It starts empty and is discarded with the epoch."""

    def __init__(self, means: RankResources, groups: Groups | None, merges: Sequence[MergeTiming] = ()) -> None:
        """With `groups`, all of their ranks begin at the same time. `merges` are timings that other groups measured."""
        self._resources = means
        config, model, pool, backend = means.config, means.model, means.pool, means.backend
        wire = PartialCodec(backend, getattr(torch, config.merge_dtype))
        self.peers = peers = self._make_peers(groups, wire, merges)
        self._block_table = BlockTable(peers.rank, config.block_size, pool.window_block_size)
        self._sequences = RowState(pool.window_block_size)
        inputs, model_runner = self._make_inputs(wire), ModelRunner(model, pool, backend, peers)
        drafts = DraftRollback(self._block_table, self._sequences, pool, backend)
        verifier = Verifier(model, self._block_table, config, peers)
        self._prefill = PrefillRunner(inputs, model_runner, peers)
        self._decode = DecodeRunner(inputs, model_runner, peers, means.sampler, means.last_ids, drafts, verifier)
        self._before = done(None)
        """The step that was begun last."""
        self._graphs = means.graphs
        if groups and self._graphs is not None and groups.world.transport == "gloo":
            log.info("graphs: off, because tensors are sent through host memory")
            self._graphs = None

    def _make_peers(self, groups: Groups | None, wire: PartialCodec, timings: Sequence[MergeTiming]) -> Peers:
        model, config, device = self._resources.model, self._resources.config, self._resources.device
        if groups is None:
            return Peers(device)
        wire.agree(groups.world, device)
        widest = max(model.layers.values(), key=lambda layer: layer.num_heads * layer.value_dim)
        heads, dim = widest.num_heads, widest.value_dim
        if config.merge == "auto":
            chosen = choose_merge(groups, wire, heads, dim, device, timings)
            return Peers(device, groups.world, CountedMerge(chosen, wire), chosen.timings)
        merge = make_merge(config.merge, groups, wire)
        # compilation and connections of the first use must not delay the first step
        merge.to_all(Partial.identity(1, heads, dim, device=device))
        return Peers(device, groups.world, CountedMerge(merge, wire))

    def _make_inputs(self, wire: PartialCodec) -> InputBuilder:
        model, config, pool = self._resources.model, self._resources.config, self._resources.pool
        block_table, size = self._block_table, self.peers.world_size
        sharded, windowed = sharded_layers(model, config), windowed_layers(model, config)
        return InputBuilder(
            block_table,
            pool,
            model.layers,
            world_size=size,
            pasts=PastBuilder(block_table, pool, sharded, world_size=size, way=config.prefill, wire=wire),
            windows=WindowBuilder(block_table, windowed, world_size=size, device=pool.device) if windowed else None,
            states=StateBuilder(block_table) if pool.states is not None else None,
            attributes_blocks=isinstance(self._resources.backend, AttributionBackend),
        )

    @torch.inference_mode()
    def prepare(self) -> None:
        """Prepares steps over memory of fixed address, if the kernels support it. A collective call."""
        self._decode.prepare(self._resources.config, self._graphs)

    def set_layout(self, layout: KvLayout) -> None:
        """Replaces the block table by the layout."""
        self._block_table.replace(layout.segments)

    def holds(self, order: Save) -> bool:
        """Whether this rank holds the runs to be saved."""
        rank = EVERY_RANK if order.of_windows else self.peers.rank
        return all(run.rank == rank and self._block_table.holds(order.segment, run) for run in order.runs)

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> StepHandle:
        """Begins a step, before the end of the previous one if it `may_overlap`. Moves and restores end before this
        method returns; their results report that all data has arrived on all ranks.
        """
        plan = self._sequences.complete(plan)
        self._block_table.release(plan.release_segments)
        for segment, end in plan.cut_segments:
            self._block_table.cut_back(segment, end)
        self._decode.forget(plan.release_sequences)
        result = StepResult(plan.epoch, plan.step, {})
        finished = done(result if self.peers.rank == 0 else None)
        comm, pool, block_table = self.peers.comm, self._resources.pool, self._block_table
        match plan.work:
            case Prefill() as work:
                self._before = self._prefill.start(work, result)
            case Decode() as work:
                self._before = self._decode.start(work, result, self._before)
            case Move() as work:
                move(work, comm, pool, block_table)
                self._before = finished
            case Restore() as work:
                restore(work, comm, pool, block_table, self._resources.kv_io.piece)
                self._before = finished
        return self._before

    def close(self) -> None:
        """Releases captured graphs. No step may be begun afterwards."""
        self._decode.close()
        self._before = done(None)
        if self._graphs is not None:
            self._graphs.release()
