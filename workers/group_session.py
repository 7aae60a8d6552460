"""The state of a rank within one epoch: its peers, the cached blocks, and the execution of steps."""

import contextlib
import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from longleaf.attention import Partial
from longleaf.comm import Groups
from longleaf.config import EngineConfig
from longleaf.kernels.backend import AttributionBackend, Backend, CapturableBackend
from longleaf.merge import CountedMerge, Merge, PartialCodec, choose_merge, make_merge
from longleaf.positions import EVERY_RANK, FLOAT32_POSITIONS
from longleaf.rank_protocol.group_messages import KvLayout, MergeTiming
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.snapshots import Save
from longleaf.rank_protocol.step import Decode, Move, Prefill, Restore, Row, StepPlan, StepResult
from workers.batch_buckets import bucket_sizes
from workers.cuda_graphs.bucket import BatchBucket
from workers.cuda_graphs.graphs import Graphs
from workers.cuda_graphs.sampling_graph import GraphSampler, TokenBroadcast
from workers.cuda_graphs.steps import FixedSteps, Launched, try_out
from workers.cuda_graphs.tokens import FixedTokens
from workers.host_copies import AsyncHostCopy, DeviceEvent
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.pools import sharded_layers, windowed_layers
from workers.kv_cache.quantized import QuantizedPool
from workers.kv_cache.slots import FloatKvPool
from workers.kv_io.kv_io import KvIo
from workers.model.model import Model
from workers.pending import StepHandle, done
from workers.sampling.acceptance import accepted_ids
from workers.sampling.device_sampler import DeviceChoice, DeviceSampler
from workers.sampling.logprobs import logprobs_of
from workers.sampling.sampler import Choice, CpuSampler
from workers.step.attention_attribution import AttributionAccumulator, BlockAttention
from workers.step.draft_rollback import DraftedBlocks, RecordKv, drafted_among
from workers.step.forward import DecodeStep, Peers, PrefillDone, PrefillStep
from workers.step.gathered_prefill import PastBuilder
from workers.step.inputs import InputBuilder, Inputs, RowNumbers
from workers.step.kv_restore import restore
from workers.step.kv_transfer import move
from workers.step.last_tokens import DeviceIds, HostIds, LastTokens
from workers.step.layers import RowLayer
from workers.step.windows import WindowBuilder
from workers.verification import Verifier

log = logging.getLogger("longleaf.rank")  # messages logged while a rank joins are shown to users


class RankResources(Protocol):
    """The resources of a rank, which outlast epochs."""

    config: EngineConfig
    device: str
    model: Model
    pool: FloatKvPool | QuantizedPool
    backend: Backend
    sampler: CpuSampler | DeviceSampler
    last_ids: LastTokens
    graphs: Graphs | None
    """None where nothing is captured."""
    kv_io: KvIo


class GroupSession:
    """The state of a rank in one epoch. It starts empty and is discarded with the epoch.

    `peers` is None at world size 1.
    """

    def __init__(self, means: RankResources, groups: Groups | None, merges: Sequence[MergeTiming] = ()) -> None:
        """With `groups`, all of their ranks begin at the same time. `merges` are timings that other groups measured."""
        self._resources = means
        self._number, self._size = (groups.world.rank, groups.world.world_size) if groups else (0, 1)
        config, model = means.config, means.model
        self._block_table = BlockTable(self._number, config.block_size)
        self._sequences = RowState(config.block_size)
        self._wire = PartialCodec(means.backend, getattr(torch, config.merge_dtype))
        self._verifier = Verifier(model, self._block_table, config, self._size)
        self._inputs = self._make_inputs(self._size)
        self._graphs = means.graphs
        self._fixed: FixedSteps | None = None
        self._before = done(None)
        """The step that was begun last."""
        self.merges: tuple[MergeTiming, ...] = ()
        """The timings on which the choice of the merge is based, if it was chosen automatically."""
        self._merge = CountedMerge(self._make_merge(groups, merges), self._wire) if groups else None
        self.peers = Peers(groups.world, self._merge) if groups and self._merge else None
        if groups and self._graphs is not None and groups.world.transport == "gloo":
            log.info("graphs: off, because tensors are sent through host memory")
            self._graphs = None

    def _make_merge(self, groups: Groups, timings: Sequence[MergeTiming]) -> Merge:
        model, config, device = self._resources.model, self._resources.config, self._resources.device
        self._wire.agree(groups.world, device)
        widest = max(model.layers.values(), key=lambda layer: layer.num_heads * layer.value_dim)
        heads, dim = widest.num_heads, widest.value_dim
        if config.merge == "auto":
            chosen = choose_merge(groups, self._wire, heads, dim, device, timings)
            self.merges = chosen.timings
            return chosen
        merge = make_merge(config.merge, groups, self._wire)
        # compilation and connections of the first use must not delay the first step
        merge.to_all(Partial.identity(1, heads, dim, device=device))
        return merge

    def _make_inputs(self, size: int) -> InputBuilder:
        model, config, block_table, pool = (
            self._resources.model,
            self._resources.config,
            self._block_table,
            self._resources.pool,
        )
        sharded, windowed = sharded_layers(model, config), windowed_layers(model, config)
        windows = WindowBuilder(block_table, windowed, world_size=size, device=self._resources.device)
        return InputBuilder(
            block_table,
            pool,
            model.layers,
            world_size=size,
            pasts=PastBuilder(block_table, pool, sharded, world_size=size, way=config.prefill, wire=self._wire),
            windows=windows if windowed else None,
            attributes_blocks=isinstance(self._resources.backend, AttributionBackend),
        )

    def min_over_ranks(self, number: int) -> int:
        """The smallest of the numbers of all ranks. A collective: all ranks call it at the same time."""
        if self.peers is None:
            return number
        return int(self.peers.comm.all_gather(torch.tensor([number], device=self._resources.device)).min())

    @torch.inference_mode()
    def prepare(self) -> None:
        """Prepares steps over memory of fixed address, if the kernels support it. A collective call."""
        backend, sampler, last_ids = self._resources.backend, self._resources.sampler, self._resources.last_ids
        can_prepare = isinstance(backend, CapturableBackend) and isinstance(last_ids, DeviceIds)
        if not self._agree(can_prepare):  # all ranks must exchange the same number of rows in a step
            return
        assert isinstance(backend, CapturableBackend)
        assert isinstance(last_ids, DeviceIds)
        rotary, sizes = self._resources.model.rotary, bucket_sizes(self._resources.config.max_rows)
        may_be_double = bool(rotary.kind) and (self._resources.config.allow_long or rotary.trained > FLOAT32_POSITIONS)
        buckets = [BatchBucket(size, self._inputs, may_be_double=may_be_double) for size in sizes]
        logits_RV = try_out(buckets, backend, self._logits)
        broadcast, graph_sampler = TokenBroadcast(sizes[-1], last_ids, self._report, self._resources.device), None
        if logits_RV is not None and isinstance(sampler, DeviceSampler):
            graph_sampler = GraphSampler(sampler, torch.zeros_like(logits_RV), broadcast.ids_R)
        keeps = isinstance(self._resources.pool, QuantizedPool) and self._resources.config.max_draft_tokens > 0
        tokens = FixedTokens() if keeps else None
        self._fixed = FixedSteps(buckets, last_ids, broadcast, graph_sampler, self._resources.device, tokens)
        self._fixed.prepare(self._logits, self._graphs, self._agree)
        self._merge_bytes()  # discards the bytes that belong to no step

    def set_layout(self, layout: KvLayout) -> None:
        """Replaces the block table by the layout."""
        self._block_table.replace(layout.segments)

    def holds(self, order: Save) -> bool:
        """Whether this rank holds the runs to be saved."""
        rank = EVERY_RANK if order.of_windows else self._number
        return all(run.rank == rank and self._block_table.holds(order.segment, run) for run in order.runs)

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> StepHandle:
        """Begins a step, before the end of the previous one if it `may_overlap`."""
        plan = self._sequences.complete(plan)
        self._block_table.release(plan.release_segments)
        self._resources.last_ids.forget(plan.release_sequences)
        self._resources.sampler.forget(plan.release_sequences)
        self._verifier.forget(plan.release_sequences)
        result = StepResult(plan.epoch, plan.step, {})
        match plan.work:
            case Prefill() as work:
                self._before = self._prefill(work, result)
            case Decode() as work:
                self._before = self._decode(work, result)
            case Move() as work:
                self._before = self._move(work, result)
            case Restore() as work:
                self._before = self._restore(work, result)
        return self._before

    def close(self) -> None:
        """Releases captured graphs. No step may be begun afterwards."""
        self._fixed, self._before = None, done(None)
        if self._graphs is not None:
            self._graphs.release()

    def _prefill(self, work: Prefill, result: StepResult) -> StepHandle:
        """The result reports that the keys are stored, and after how many seconds: on a GPU a chunk has only been
        launched by the time this method returns.
        """
        inputs = self._inputs.prefill(work)
        step = PrefillStep(
            inputs, self._resources.pool, self._resources.backend, self.peers, self._resources.model.last_layer
        )
        with contextlib.suppress(PrefillDone):
            self._forward(self._resources.model.decoder, inputs, step)
        finite_copy = AsyncHostCopy(step.has_finite_keys())
        result = msgspec.structs.replace(result, merge_bytes=self._merge_bytes())

        def finish() -> StepResult | None:
            has_finite_keys = bool(finite_copy.wait())
            is_first = self._number == 0
            return msgspec.structs.replace(result, has_finite_keys=has_finite_keys) if is_first else None

        return StepHandle(lambda: finite_copy.arrival.is_past, finish)

    def _merge_bytes(self) -> int:
        """Bytes merged since the previous step. A replayed step counts nothing."""
        return self._merge.pop_num_bytes() if self._merge else 0

    def _move(self, work: Move, result: StepResult) -> StepHandle:
        """The result reports that all data has moved on all ranks."""
        comm = self.peers.comm if self.peers else None
        move(work, comm, self._resources.pool, self._block_table)
        return done(result if self._number == 0 else None)

    def _restore(self, work: Restore, result: StepResult) -> StepHandle:
        """The result reports that all data is restored on all ranks."""
        comm = self.peers.comm if self.peers else None
        restore(work, comm, self._resources.pool, self._block_table, self._resources.kv_io.piece)
        return done(result if self._number == 0 else None)

    def _decode(self, work: Decode, result: StepResult) -> StepHandle:
        rows = self._inputs.numbers(work, self._resources.last_ids)
        sampled = [row for row in work.rows if row.token_index >= 0]
        blocks = self._drafted_blocks(rows, sampled) if rows.has_drafts else None
        begun = self._fixed.begin(rows, sampled, blocks) if self._fixed and rows.is_plain else None
        begun = begun or self._begin(rows, sampled, [row for row in work.rows if row.num_scored], blocks)
        read, merged = self._inputs.kv_bytes_read(rows), self._merge_bytes()
        result = msgspec.structs.replace(result, kv_bytes_read=read, merge_bytes=merged)
        pending = StepHandle(lambda: begun.end.is_past, lambda: self._finish(work, sampled, begun, result))
        if rows.has_drafts or isinstance(self._resources.last_ids, HostIds) or self._verifier.is_tracking(work.rows):
            self._before.result()  # an error in this step must not show in the answer to the previous one
            # Compared logits must not be overwritten by the next step, and refused drafts must be dropped before it.
            pending.result()
        return pending

    def _begin(
        self, rows: RowNumbers, sampled: Sequence[Row], scored: Sequence[Row], blocks: DraftedBlocks | None
    ) -> Launched:
        """Launches a step of any shape, over newly allocated tensors."""
        inputs = self._inputs.tensors(rows, self._resources.last_ids)
        accumulator = self._accumulator(rows) if rows.attributed else None
        logits_RV = self._logits(inputs, blocks.record if blocks else None, accumulator)
        reports = accumulator.reports() if accumulator else None
        scores = None
        if logits_RV is not None and scored:
            logits_RV, scored_SV = logits_RV.split([len(rows.sample_rows), len(rows.scored_rows)])
            scores = AsyncHostCopy(
                logprobs_of(scored_SV, [t for row in scored for t in row.token_ids[-row.num_scored :]])
            )
        choice = self._resources.sampler.start(sampled, logits_RV) if sampled and logits_RV is not None else None
        reported_N = self._broadcast_tokens(sampled, choice) if sampled else None
        ids = AsyncHostCopy(reported_N) if reported_N is not None and choice is None and rows.has_drafts else None
        copying = choice if isinstance(choice, DeviceChoice) else ids
        end = copying.arrival if copying else DeviceEvent(torch.device(self._resources.device))
        return Launched(end, choice, logits_RV, scores, reports, ids, blocks)

    def _accumulator(self, rows: RowNumbers) -> AttributionAccumulator:
        comm, backend = self.peers.comm if self.peers else None, self._resources.backend
        blocks = (
            BlockAttention(backend, rows.blocks) if rows.blocks and isinstance(backend, AttributionBackend) else None
        )
        return AttributionAccumulator(rows.attributed, self._resources.pool, comm, blocks)

    def _drafted_blocks(self, rows: RowNumbers, sampled: Sequence[Row]) -> DraftedBlocks | None:
        """The blocks to roll back when drafts are refused; None where a refused draft leaves only its keys."""
        pool, drafted = self._resources.pool, drafted_among(sampled, rows.sample_rows)
        if not isinstance(pool, QuantizedPool):
            return None
        return DraftedBlocks(pool, self._resources.backend, drafted, rows.slots, rows.window_slots)

    def _broadcast_tokens(self, sampled: Sequence[Row], choice: Choice | None) -> Tensor:
        """Broadcasts the rows of the choice, one per position, from rank 0 to all ranks."""
        num_positions = sum(1 + len(row.draft_ids) for row in sampled)
        nothing = torch.zeros(num_positions, dtype=torch.long, device=self._resources.device)
        reported_N = self._report(nothing if choice is None else choice.ids())
        self._resources.last_ids.record(sampled, reported_N)
        return reported_N

    def _cut_back(self, rows: Sequence[Row], ids: Iterable[Sequence[object]], blocks: DraftedBlocks | None) -> None:
        """Drops the keys behind the accepted drafts of rows, given the ids or tokens of each row."""
        num_left = dict[int, int]()
        for row, found in zip(rows, ids, strict=True):
            num_accepted = max(0, len(found) - 1)
            if num_accepted < len(row.draft_ids):
                num_left[row.sequence] = row.num_known + num_accepted
                end = row.start + row.num_known + num_accepted
                self._block_table.cut_back(row.path[-1], end)
                self._sequences.cut_back(row.sequence, end)
        if blocks is not None and num_left:
            blocks.restore(num_left)

    def _finish(self, work: Decode, sampled: Sequence[Row], begun: Launched, result: StepResult) -> StepResult | None:
        """The result of a step, once the device is done with it."""
        begun.end.wait()
        if begun.logits_RV is None:
            if begun.ids is not None:
                self._cut_back(sampled, accepted_ids(sampled, begun.ids.wait().tolist()), begun.blocks)
            return None
        tokens = begun.choice.tokens() if begun.choice else []
        self._cut_back(sampled, tokens, begun.blocks)
        self._verifier.record_logits(sampled, tokens, begun.logits_RV)
        broken = self._resources.sampler.broken
        return msgspec.structs.replace(
            result,
            tokens={row.sequence: found for row, found in zip(sampled, tokens, strict=True) if found},
            not_finite=tuple(row.sequence for row in sampled if row.sequence in broken),
            comparisons=self._verifier.compare(
                row for row, found in zip(sampled, tokens, strict=True) if len(found) > len(row.draft_ids)
            ),
            attention=begun.attention.attention() if begun.attention else {},
            scores=_by_sequence(work.rows, begun.scores.wait().tolist()) if begun.scores else {},
        )

    def _agree(self, is_so: bool) -> bool:
        """Whether `is_so` is true on all ranks. A collective: all ranks call it at the same time."""
        if self.peers is None:
            return is_so
        votes = self.peers.comm.all_gather(torch.tensor([is_so], dtype=torch.long, device=self._resources.device))
        return is_so and bool(votes.min())

    def _report(self, ids_T: Tensor) -> Tensor:
        """Broadcasts the ids that rank 0 has chosen."""
        return self.peers.comm.broadcast(ids_T) if self.peers else ids_T

    def _logits(
        self,
        inputs: Inputs[RowLayer],
        record: RecordKv | None = None,
        accumulator: AttributionAccumulator | None = None,
    ) -> Tensor | None:
        """Runs the model. Rank 0 returns the logits [R, V] of the R requested rows, other ranks None."""
        step = DecodeStep(inputs, self._resources.pool, self._resources.backend, self.peers, accumulator, record)
        if self._number != 0:
            self._forward(self._resources.model.decoder, inputs, step)
            return None
        assert inputs.sample_rows_R is not None
        return self._forward(self._resources.model.module, inputs, step, logits_to_keep=inputs.sample_rows_R)[0][0]

    def _forward(
        self, module: torch.nn.Module, inputs: Inputs[Any], step: DecodeStep | PrefillStep, **options: Tensor
    ) -> tuple[Tensor, ...]:
        self._resources.model.ropes.rows = inputs.ropes
        arguments = self._resources.model.arguments(step.attend, inputs.token_ids_T, inputs.positions_T)
        return module(**arguments, return_dict=False, **options)


def _by_sequence(rows: Sequence[Row], scores: Sequence[float]) -> dict[int, tuple[float, ...]]:
    """The scores of each scored row, by sequence."""
    left = iter(scores)
    return {row.sequence: tuple(islice(left, row.num_scored)) for row in rows if row.num_scored}
