"""The share of rows' attention that falls on each span of their context.

The share of a key is exp(score - lse), with the merged natural-log logsumexp of the row. Kernels that can report sums
per block of keys do so; otherwise a separate pass over the keys computes the same shares. The outputs of the rows are
bit-identical either way, and rows that request no attribution cost nothing.

Shape letters: T rows of the step, A sequences that are reported together, R their rows, K key heads, G queries per key
head, H = K * G heads, M = R * G, D dim, S slots, N columns (`workers.step.attribution_plan`), W ranks.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from longleaf.attention.block_attribution import AttributionColumns
from longleaf.attention.masks import hidden
from longleaf.comm import Comm
from longleaf.kernels.backend import AttributionBackend, Backend
from longleaf.rank_protocol.step import HEADS_PER_LAYER, Attention
from longleaf.runs import ceil_div
from workers.host_copies import AsyncHostCopy, numbers_on
from workers.kv_cache.slots import KvPool
from workers.model.hook import LayerCall
from workers.step.attribution_plan import SINK, AttributionGroup, BlockPlan, CutEntries, SpanKeys

TILE_KEYS = 4096
"""Keys per tile: the scores of a tile are materialized."""


class SpanSums:
    """Running sums, on one rank, for sequences that are reported together."""

    def __init__(self, group: AttributionGroup, device: str) -> None:
        self.group = group
        self.rows_R = numbers_on(device, group.row_numbers)
        shape = (len(group.rows), group.num_columns)
        self.means_AN = torch.zeros(shape, device=device)
        """Sums over heads, float32, until all layers are counted."""
        self.largest_AN = torch.full(shape, -1.0, device=device)
        self.heads_AN = torch.zeros(shape, dtype=torch.int32, device=device)
        self.num_heads = 0

    def add(self, layer: int, masses_RHN: Tensor) -> None:
        """Adds the heads of a layer."""
        self.num_heads += masses_RHN.shape[1]
        sizes = [run.end - run.start for _, run, _ in self.group.rows]
        masses_AHN = torch.stack([rows_RHN.mean(dim=0) for rows_RHN in masses_RHN.split(sizes)])
        self.means_AN += masses_AHN.sum(dim=1)
        most_AN, heads_AN = masses_AHN.max(dim=1)
        is_more_AN = most_AN > self.largest_AN
        self.largest_AN = torch.where(is_more_AN, most_AN, self.largest_AN)
        self.heads_AN = torch.where(is_more_AN, heads_AN.int() + layer * HEADS_PER_LAYER, self.heads_AN)

    def add_blocks(
        self,
        layer: int,
        backend: AttributionBackend,
        reported_KE2: Tensor,
        lse_TH: Tensor,
        sink_H: Tensor | None,
        columns: AttributionColumns,
    ) -> None:
        """Adds the heads of a layer from the block sums that kernels reported."""
        self.num_heads += lse_TH.shape[1]
        found, sink_column = (self.means_AN, self.largest_AN, self.heads_AN), self.group.view.num_spans + SINK
        place = {"sink_column": sink_column, "first_head": layer * HEADS_PER_LAYER}
        backend.add_shares(reported_KE2, lse_TH, sink_H, columns, found, **place)

    def numbers(self) -> Tensor:
        """Means, maxima and the heads of the maxima (int32, bit for bit): [3, A * N], float32."""
        heads_AN = self.heads_AN.view(torch.float32)
        return torch.stack((self.means_AN / max(1, self.num_heads), self.largest_AN, heads_AN)).flatten(1)


class SpanAttention:
    """The sums over all ranks, being copied to the host."""

    def __init__(self, groups: Sequence[AttributionGroup], numbers_3N: Tensor) -> None:
        self._groups = groups
        self._copy = AsyncHostCopy(numbers_3N)

    def attention(self) -> dict[int, tuple[Attention, ...]]:
        """Attention of the reported rows of each sequence, in order. Waits for the copy to the host."""
        rest_3N, found = self._copy.wait(), dict[int, tuple[Attention, ...]]()
        for requested in self._groups:
            for attribution_row in requested.rows:
                num_spans = requested.view.num_spans
                means_N, largest_N, heads_N = rest_3N[:, : requested.num_columns]
                rest_3N = rest_3N[:, requested.num_columns :]
                numbers = (means_N, largest_N[:num_spans], heads_N[:num_spans].view(torch.int32))
                attention = Attention(*(each.numpy().tobytes() for each in numbers))
                found[attribution_row.sequence] = (*found.get(attribution_row.sequence, ()), attention)
        return found


class AttributionAccumulator:
    """Accumulates, layer by layer of one step, the attention on the columns of all rows that request it."""

    def __init__(
        self,
        groups: Sequence[AttributionGroup],
        plan: BlockPlan | None,
        pool: KvPool,
        backend: Backend,
        comm: Comm | None,
    ) -> None:
        """`plan` has the block sums that the backend reports, if it reports any. Sinks are counted on rank 0 only."""
        self._sums = [SpanSums(requested, pool.device) for requested in groups]
        self._pool = pool
        self._comm = comm
        self._plan = plan
        self._backend = backend if isinstance(backend, AttributionBackend) else None
        self._has_sink = comm is None or comm.rank == 0

    def add(self, layer: int, q_THD: Tensor, lse_TH: Tensor, call: LayerCall) -> None:
        """Adds a full-attention layer, if it is among the counted layers: queries as attention gets them, and the
        natural-log logsumexp [T, H] over all visible keys.
        """
        reported_KE2 = self._plan.sums.take() if self._plan else None
        for number, sums in enumerate(self._sums):
            if layer not in sums.group.view.layers:
                continue
            if self._plan is None or self._backend is None or reported_KE2 is None:
                sums.add(layer, self._of_layer(layer, sums, q_THD, lse_TH, call))
                continue
            sinks = call.sink_H if self._has_sink else None
            self._write_cuts(layer, sums, self._plan.cuts[number], reported_KE2, q_THD, call)
            sums.add_blocks(layer, self._backend, reported_KE2, lse_TH, sinks, self._plan.columns[number])

    def reports(self) -> SpanAttention | None:
        """Combines the sums of all ranks. A collective; only rank 0 returns the result."""
        numbers_3N = torch.cat([sums.numbers() for sums in self._sums], dim=1)
        if self._comm is not None:
            found_W3N = self._comm.all_gather(numbers_3N)
            if not self._has_sink:
                return None
            largest_N, ranks_N = found_W3N[:, 1].max(dim=0)
            heads_N = found_W3N[:, 2].gather(0, ranks_N[None])[0]
            numbers_3N = torch.stack((found_W3N[:, 0].sum(dim=0), largest_N, heads_N))
        return SpanAttention([sums.group for sums in self._sums], numbers_3N)

    def _write_cuts(
        self,
        layer: int,
        sums: SpanSums,
        cuts: Sequence[CutEntries],
        reported_KE2: Tensor,
        q_THD: Tensor,
        call: LayerCall,
    ) -> None:
        """Writes the entries of keys that the kernels do not report separately: at most one block."""
        if not cuts:
            return
        q_KDM, group = self._queries(layer, sums, q_THD, call)
        for cut in cuts:
            scores_KSM = self._scores(layer, cut.keys, q_KDM, call)
            peaks_KM = scores_KSM.amax(dim=1)
            sums_KM = (scores_KSM - peaks_KM.unsqueeze(1)).exp_().sum(dim=1)
            first = cut.start * group
            reported_KE2[:, first : first + q_KDM.shape[2]] = torch.stack((peaks_KM, sums_KM), dim=-1)

    def _queries(self, layer: int, sums: SpanSums, q_THD: Tensor, call: LayerCall) -> tuple[Tensor, int]:
        """The scaled queries of the attributed rows, [K, D, M], float32, and their number per key head."""
        num_kv_heads = self._pool.num_kv_heads(layer)
        q_RKGD = q_THD[sums.rows_R].unflatten(1, (num_kv_heads, -1)).float() * call.scale
        return q_RKGD.transpose(0, 1).flatten(1, 2).transpose(1, 2), q_RKGD.shape[2]

    def _of_layer(self, layer: int, sums: SpanSums, q_THD: Tensor, lse_TH: Tensor, call: LayerCall) -> Tensor:
        """The share of each row and head that falls on the columns, [R, H, N], float32."""
        requested, num_kv_heads = sums.group, self._pool.num_kv_heads(layer)
        q_KDM, group = self._queries(layer, sums, q_THD, call)
        num_rows = q_KDM.shape[2] // group
        lse_K1M = lse_TH[sums.rows_R].unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2).unsqueeze(1)
        masses_KNM = q_KDM.new_zeros(num_kv_heads, requested.num_columns, num_rows * group)
        for keys in _tiles([*requested.context, *requested.cut]):
            _count(masses_KNM, self._weights(layer, keys, q_KDM, lse_K1M, call, 0, group), keys)
        first = 0
        for _, run, own in requested.rows:
            some = slice(first, first + (run.end - run.start) * group)
            for keys in _tiles(own):
                ahead = keys.position + keys.num_keys - 1 - run.start
                weights_KSM = self._weights(layer, keys, q_KDM[..., some], lse_K1M[..., some], call, ahead, group)
                _count(masses_KNM[..., some], weights_KSM, keys)
            first = some.stop
        masses_RHN = masses_KNM.unflatten(2, (num_rows, group)).permute(2, 0, 3, 1).flatten(1, 2)
        if call.sink_H is not None and self._has_sink:
            masses_RHN[..., requested.view.num_spans + SINK] = (call.sink_H.float() - lse_TH[sums.rows_R]).exp_()
        return masses_RHN

    def _weights(
        self, layer: int, keys: SpanKeys, q_KDM: Tensor, lse_K1M: Tensor, call: LayerCall, ahead: int, group: int
    ) -> Tensor:
        """The share of each key, [K, S, M]; `ahead` of the keys are after the first row."""
        scores_KSM = self._scores(layer, keys, q_KDM, call)
        if ahead > 0:
            num_rows = q_KDM.shape[2] // group
            unseen_RS = hidden(num_rows, keys.num_keys, keys.num_keys - 1 - ahead, None, str(q_KDM.device))
            scores_KSM.masked_fill_(unseen_RS.repeat_interleave(group, dim=0).T, float("-inf"))
        return scores_KSM.sub_(lse_K1M).exp_()

    def _scores(self, layer: int, keys: SpanKeys, q_KDM: Tensor, call: LayerCall) -> Tensor:
        """The score of each key, [K, S, M]."""
        k_KSD = self._pool.keys_between(layer, keys.slot, keys.slot + keys.num_keys)
        scores_KSM = torch.matmul(k_KSD, q_KDM)  # twice as fast on a CPU as the transposed product
        return scores_KSM if call.softcap is None else scores_KSM.div_(call.softcap).tanh_().mul_(call.softcap)


def _tiles(found: Iterable[SpanKeys]) -> Iterator[SpanKeys]:
    return (tile for keys in found for tile in keys.tiles(TILE_KEYS))


def _count(masses_KNM: Tensor, weights_KSM: Tensor, keys: SpanKeys) -> None:
    """Adds the shares of the keys of each column."""
    end = keys.before + keys.num_keys
    num_columns = ceil_div(end, keys.size)
    if keys.before or end % keys.size:
        weights_KSM = F.pad(weights_KSM, (0, 0, keys.before, num_columns * keys.size - end))
    sums_KNM = weights_KSM.unflatten(1, (num_columns, keys.size)).sum(dim=2)
    masses_KNM[:, keys.column : keys.column + num_columns] += sums_KNM
