"""Runs decode steps through the bucket that fits: one copy to the device, three replays, one copy back."""

import logging
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from longleaf.rank_protocol.step import Row
from workers.cuda_graphs.bucket import BatchBucket, Forward, Sampled, StepMemory, with_token_ids
from workers.cuda_graphs.graphs import Agree, CaptureRefused, CollectiveGraphs, Graphs, Work
from workers.cuda_graphs.sampling_graph import GraphSampler, TokenBroadcast
from workers.host_copies import AsyncHostCopy, DeviceEvent
from workers.sampling.acceptance import drafts_of
from workers.sampling.device_sampler import Batch
from workers.sampling.fixed_shape import KINDS, kind_of
from workers.sampling.sampler import Choice
from workers.step.attention_attribution import SpanAttention
from workers.step.draft_rollback import DraftedBlocks, FixedTokens
from workers.step.inputs import Inputs, RowNumbers
from workers.step.last_tokens import DeviceIds
from workers.step.layers import RowLayer

log = logging.getLogger(__name__)


class Sent(NamedTuple):
    """The numbers sent to the device for a step."""

    variant: int | None
    """None where this rank's tables have no room for the step."""
    turn: int
    """The index of the host buffer."""
    batch: Batch | None
    """On rank 0, if rows are sampled."""


class Launched(NamedTuple):
    """A step that was launched on the device."""

    end: DeviceEvent
    choice: Choice | None
    """On rank 0, if rows are sampled."""
    logits_RV: Tensor | None
    """The logits of the sampled rows, on rank 0; valid until the next step is begun."""
    scores: AsyncHostCopy | None = None
    """On rank 0, if tokens are scored: their natural-log probabilities, for all rows in the order of the plan."""
    attention: SpanAttention | None = None
    """On rank 0, if rows request attention attribution."""
    ids: AsyncHostCopy | None = None
    """On other ranks, if rows have drafts: the reported ids of all positions."""
    blocks: DraftedBlocks | None = None
    """The blocks that drafts are written to, where a refused draft leaves more than its keys."""


class FixedSteps:
    """Decode steps over memory of fixed address, captured or launched eagerly."""

    def __init__(
        self,
        buckets: Sequence[BatchBucket],
        last_ids: DeviceIds,
        broadcast: TokenBroadcast,
        sampler: GraphSampler | None,
        device: str,
        tokens: FixedTokens | None = None,
    ) -> None:
        """The buckets are sorted by their rows, and have been tried out. `sampler` is set on rank 0. `tokens` is
        needed where refused drafts leave more than their keys.
        """
        self._buckets = buckets
        self._memory = StepMemory(max(bucket.fields.tables.stop for bucket in buckets), device)
        self._last_ids = last_ids
        self._broadcast = broadcast
        self._sampler = sampler
        self._tokens = tokens
        self._works: dict[Hashable, Work] = {}
        """Works by key: the model by bucket and variant, sampling by bucket and kind, the broadcast by bucket."""
        self.num_captured = 0
        self._ends: list[DeviceEvent] = []
        """The ends of the last two steps."""

    def prepare(self, forward: Forward, graphs: Graphs | None, agree: Agree) -> None:
        """Captures all steps, the largest first, so that smaller ones reuse its memory. If a capture is refused, the
        reason is logged and those steps are launched eagerly. All ranks prepare at the same time and capture the same
        works, except for sampling, which only rank 0 does.
        """
        self._forward = forward
        shared = CollectiveGraphs(graphs, agree) if graphs is not None else None
        reasons: dict[bool, str] = {}
        for bucket in reversed(self._buckets):
            self._send(bucket, bucket.nothing, ())
            for key, work, is_shared in self._all(bucket, forward):
                work()
                self._works[key] = work
                if (place := shared if is_shared else graphs) is None or is_shared in reasons:
                    continue
                try:
                    place.check_room()
                    self._works[key] = place.capture(work)
                    self.num_captured += 1
                except CaptureRefused as error:
                    reasons[is_shared] = str(error)
            DeviceEvent(self._memory.device_N.device).wait()  # before the sent numbers are overwritten
        for reason in reasons.values():
            message = "graphs: %d of %d parts of decode steps are captured (the others are slower): %s"
            log.warning(message, self.num_captured, len(self._works), reason)
        if graphs is not None and not reasons:
            log.info("graphs: decode steps of up to %d rows", self._buckets[-1].num_rows)

    def _all(self, bucket: BatchBucket, forward: Forward) -> Iterator[tuple[Hashable, Work, bool]]:
        """The works of a bucket by key, and whether all ranks do them."""
        device_N, fields, num_rows = self._memory.device_N, bucket.fields, bucket.num_rows
        for number, inputs in enumerate(bucket.bind(device_N)):
            yield (num_rows, number), partial(self._run_model, forward, inputs), True
        if self._sampler is not None:
            for kind in KINDS:
                yield (num_rows, kind), self._sampler.work(device_N, fields, kind), False
        yield num_rows, self._broadcast.work(device_N, fields), True

    def _run_model(self, forward: Forward, inputs: Inputs[RowLayer]) -> None:
        record = self._tokens.record if self._tokens else None
        logits_TV = forward(with_token_ids(inputs, self._last_ids.resolve(inputs.token_ids_T)), record)
        if self._sampler is not None:
            assert logits_TV is not None
            self._sampler.logits_RV[: len(logits_TV)].copy_(logits_TV)

    def begin(self, rows: RowNumbers, sampled: Sequence[Row], blocks: DraftedBlocks | None = None) -> Launched | None:
        """Launches a step. Returns None, without any effect, if the step does not fit: it has too many rows, or ropes
        that the buckets do not support. All ranks decide alike, on shared information, because they exchange the same
        number of rows. `blocks` are the blocks that drafts are written to, where refused drafts leave more than their
        keys.
        """
        bucket = next((bucket for bucket in self._buckets if bucket.can_take(rows)), None)
        if bucket is None:
            return None
        if len(self._ends) > 1:
            self._ends.pop(0).wait()  # its host buffer is filled now
        variant, turn, batch = self._send(bucket, rows, sampled)
        if variant is not None:
            self._works[bucket.num_rows, variant]()
        else:  # eager, with its own tables and the same number of rows
            self._run_model(self._forward, bucket.inputs(self._memory.device_N, rows.reads))
        if blocks is not None:
            assert self._tokens is not None, "no drafts were to be expected"
            blocks.stored = self._tokens.stored_by_layer(bucket.num_rows)
        choice, logits_RV = None, None
        if self._sampler is not None:
            logits_RV = self._sampler.logits_RV[: len(rows.sample_rows)]
            if batch is not None:
                choice = self._sampler.constrained_choice(sampled)
            if batch is not None and choice is None:
                kind = kind_of(batch.needs)
                self._works[bucket.num_rows, kind]()
                choice = self._sampler.choice(sampled, batch, kind, turn)
        ids = None
        if sampled:
            self._works[bucket.num_rows]()
            if choice is None and rows.has_drafts:
                ids = self._broadcast.read(len(rows.sample_rows), turn)
        end = choice.arrival if choice else ids.arrival if ids else DeviceEvent(self._memory.device_N.device)
        self._ends.append(end)
        return Launched(end, choice, logits_RV, ids=ids, blocks=blocks)

    def _send(self, bucket: BatchBucket, rows: RowNumbers, sampled: Sequence[Row]) -> Sent:
        """Copies the numbers of a step to the device."""
        host_N, turn = self._memory.host(), self._memory.turn
        positions = Sampled(self._last_ids.places(sampled), *drafts_of(sampled))
        variant, num_numbers = bucket.fill(host_N, rows, positions)
        batch = self._sampler.fill(host_N, bucket.fields, sampled) if self._sampler else None
        self._memory.send(num_numbers)
        return Sent(variant, turn, batch)
