"""Runs decode steps: from rows to the tokens, scores and attention that they request."""

from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec
import torch
from torch import Tensor

from longleaf.config import EngineConfig
from longleaf.kernels.backend import CapturableBackend
from longleaf.positions import FLOAT32_POSITIONS
from longleaf.rank_protocol.step import Decode, Row, StepResult
from workers.cuda_graphs.bucket import BatchBucket
from workers.cuda_graphs.graphs import Graphs
from workers.cuda_graphs.sampling_graph import GraphSampler, TokenBroadcast
from workers.cuda_graphs.steps import FixedSteps, Launched
from workers.host_copies import AsyncHostCopy, DeviceEvent
from workers.kv_cache.quantized import QuantizedPool
from workers.kv_cache.workspace_estimate import bucket_sizes
from workers.rank_runtime import StepHandle
from workers.runners.verification import Verifier
from workers.sampling.acceptance import accepted_ids
from workers.sampling.device_sampler import DeviceChoice, DeviceSampler
from workers.sampling.logprobs import logprobs_of
from workers.sampling.sampler import Choice, CpuSampler
from workers.step.attention_attribution import AttributionAccumulator
from workers.step.draft_rollback import DraftedBlocks, DraftRollback, FixedTokens
from workers.step.forward import ModelRunner, Peers
from workers.step.inputs import InputBuilder, RowNumbers
from workers.step.last_tokens import DeviceIds, HostIds, LastTokens


class DecodeRunner:
    """Runs the decode steps of one epoch."""

    def __init__(
        self,
        inputs: InputBuilder,
        model_runner: ModelRunner,
        peers: Peers,
        sampler: CpuSampler | DeviceSampler,
        last_ids: LastTokens,
        drafts: DraftRollback,
        verifier: Verifier,
    ) -> None:
        self._inputs = inputs
        self._model_runner = model_runner
        self._peers = peers
        self._sampler = sampler
        self._last_ids = last_ids
        self._drafts = drafts
        self._verifier = verifier
        self._fixed: FixedSteps | None = None

    def prepare(self, config: EngineConfig, graphs: Graphs | None) -> None:
        """Prepares steps over memory of fixed address, if the kernels support it. A collective call."""
        runner, peers, last_ids, backend = self._model_runner, self._peers, self._last_ids, self._model_runner.backend
        # steps in mixers read numbers of the host, and have other launches for other sequences
        is_fixed = runner.model.mixers is None
        can_prepare = is_fixed and isinstance(backend, CapturableBackend) and isinstance(last_ids, DeviceIds)
        if not peers.agree(can_prepare):  # all ranks must exchange the same number of rows in a step
            return
        assert isinstance(backend, CapturableBackend)
        assert isinstance(last_ids, DeviceIds)
        rotary, sizes = runner.model.rotary, bucket_sizes(config.max_rows)
        may_be_double = bool(rotary.kind) and (config.allow_long or rotary.trained > FLOAT32_POSITIONS)
        buckets = [BatchBucket(size, self._inputs, may_be_double=may_be_double) for size in sizes]
        logits_RV = [bucket.warm_up(backend, runner.logits) for bucket in buckets][-1]
        broadcast, graph_sampler = TokenBroadcast(sizes[-1], last_ids, peers.broadcast, peers.device), None
        if logits_RV is not None and isinstance(self._sampler, DeviceSampler):
            graph_sampler = GraphSampler(self._sampler, torch.zeros_like(logits_RV), broadcast.ids_R)
        tokens = FixedTokens() if isinstance(runner.pool, QuantizedPool) and config.max_draft_tokens > 0 else None
        self._fixed = FixedSteps(buckets, last_ids, broadcast, graph_sampler, peers.device, tokens)
        self._fixed.prepare(runner.logits, graphs, peers.agree)
        peers.pop_merge_bytes()  # these bytes belong to no step

    def start(self, work: Decode, result: StepResult, before: StepHandle) -> StepHandle:
        """Begins a step. `before` is the previous step."""
        rows = self._inputs.numbers(work, self._last_ids)
        sampled = [row for row in work.rows if row.token_index >= 0]
        blocks = self._drafts.save_blocks(rows, sampled) if rows.has_drafts else None
        begun = self._fixed.begin(rows, sampled, blocks) if self._fixed and rows.is_plain else None
        begun = begun or self._begin(work, rows, sampled, blocks)
        read, merged = self._inputs.kv_bytes_read(rows), self._peers.pop_merge_bytes()
        result = msgspec.structs.replace(result, kv_bytes_read=read, merge_bytes=merged)
        pending = StepHandle(lambda: begun.end.is_past, lambda: self._finish(work, sampled, begun, result))
        if rows.has_drafts or isinstance(self._last_ids, HostIds) or self._verifier.is_tracking(work.rows):
            before.result()  # an error in this step must not show in the answer to the previous one
            # Compared logits must not be overwritten by the next step, and refused drafts must be dropped before it.
            pending.result()
        return pending

    def forget(self, sequences: Sequence[int]) -> None:
        """Drops the state of sequences that have ended."""
        self._last_ids.forget(sequences)
        self._sampler.forget(sequences)
        self._verifier.forget(sequences)

    def close(self) -> None:
        """Drops prepared steps. No step may be begun afterwards."""
        self._fixed = None

    def _begin(self, work: Decode, rows: RowNumbers, sampled: Sequence[Row], blocks: DraftedBlocks | None) -> Launched:
        """Launches a step of any shape, over newly allocated tensors."""
        inputs, runner, peers = self._inputs.tensors(rows, self._last_ids), self._model_runner, self._peers
        accumulator = None
        if rows.attributed:
            accumulator = AttributionAccumulator(rows.attributed, rows.blocks, runner.pool, runner.backend, peers.comm)
        logits_RV = runner.logits(inputs, blocks.record if blocks else None, accumulator)
        reports = accumulator.reports() if accumulator else None
        scores = None
        if logits_RV is not None and rows.scored_rows:
            logits_RV, scored_SV = logits_RV.split([len(rows.sample_rows), len(rows.scored_rows)])
            scored_ids = [i for row in work.rows if row.num_scored for i in row.token_ids[-row.num_scored :]]
            scores = AsyncHostCopy(logprobs_of(scored_SV, scored_ids))
        choice = self._sampler.start(sampled, logits_RV) if sampled and logits_RV is not None else None
        reported_N = self._broadcast_tokens(sampled, choice) if sampled else None
        ids = AsyncHostCopy(reported_N) if reported_N is not None and choice is None and rows.has_drafts else None
        copying = choice if isinstance(choice, DeviceChoice) else ids
        end = copying.arrival if copying else DeviceEvent(torch.device(peers.device))
        return Launched(end, choice, logits_RV, scores, reports, ids, blocks)

    def _broadcast_tokens(self, sampled: Sequence[Row], choice: Choice | None) -> Tensor:
        """Broadcasts the rows of the choice, one per position, from rank 0 to all ranks."""
        num_positions = sum(1 + len(row.draft_ids) for row in sampled)
        nothing = torch.zeros(num_positions, dtype=torch.long, device=self._peers.device)
        reported_N = self._peers.broadcast(nothing if choice is None else choice.ids())
        self._last_ids.record(sampled, reported_N)
        return reported_N

    def _finish(self, work: Decode, sampled: Sequence[Row], begun: Launched, result: StepResult) -> StepResult | None:
        """The result of a step, once the device is done with it."""
        begun.end.wait()
        if begun.logits_RV is None:
            if begun.ids is not None:
                self._drafts.cut_back(sampled, accepted_ids(sampled, begun.ids.wait().tolist()), begun.blocks)
            self._verifier.assist(sampled)
            return None
        tokens = begun.choice.tokens() if begun.choice else []
        self._drafts.cut_back(sampled, tokens, begun.blocks)
        self._verifier.record_logits(sampled, tokens, begun.logits_RV)
        broken, constraints = self._sampler.broken, self._sampler.constraints
        attention = begun.attention.attention() if begun.attention else {}
        for row, found in zip(sampled, tokens, strict=True):
            if row.draft_ids and row.sequence in attention:  # rows behind a refused draft gave no token
                attention[row.sequence] = attention[row.sequence][: len(found)]
        return msgspec.structs.replace(
            result,
            tokens={row.sequence: found for row, found in zip(sampled, tokens, strict=True) if found},
            not_finite=tuple(row.sequence for row in sampled if row.sequence in broken),
            completed=constraints.completed(sampled),
            # a sequence that failed behind drafts has tokens; the next step reports it
            unmatched=constraints.failures(row for row, found in zip(sampled, tokens, strict=True) if not found),
            forced=begun.choice.forced() if begun.choice else {},
            comparisons=self._verifier.compare(sampled, tokens),
            attention=attention,
            scores=_by_sequence(work.rows, begun.scores.wait().tolist()) if begun.scores else {},
        )


def _by_sequence(rows: Iterable[Row], scores: Sequence[float]) -> dict[int, tuple[float, ...]]:
    """The scores of each scored row, by sequence."""
    left = iter(scores)
    return {row.sequence: tuple(islice(left, row.num_scored)) for row in rows if row.num_scored}
