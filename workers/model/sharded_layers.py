"""Layers whose weights are divided over the ranks. Each computes the same function as the layer that it replaces.

There are two kinds of rows. Replicated rows are the same on every rank: in decode, and in comparisons. Own rows differ
between ranks, which all have the same number of them: in prefill. A layer returns the complete result for the rows that
it is given, so the modules around it do not change.

All ranks sum addends in the same order, so that all compute the same bits. Models choose experts by these numbers, and
the slices of one expert are on all ranks. For the same reason, ranks must have the same kind of processor: numbers that
each rank computes itself, such as norms, must be equal.

The share of a rank may change between epochs: layers read it from the exchange.

Shape letters: T rows of a rank, R rows to compute (T, or those of all ranks), F features, N ranks.
"""

import copy
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from longleaf.comm import Comm
from longleaf.errors import GroupFailed
from longleaf.shares import NUM_PARTS
from workers.model.weight_shares import Range, Share


class RowExchange:
    """The exchanges of sharded layers with the ranks that hold the other shares."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._comm: Comm | None = None
        """None outside of an epoch, and in an epoch of one rank."""
        self._shares: tuple[Share, ...] = ()
        """The shares of the ranks of the epoch, in rank order."""
        self._order: tuple[int, ...] = ()
        """The ranks in the order of their first parts, in which addends are summed."""
        self._has_own_rows = False

    @property
    def share(self) -> Share:
        """The share that this rank holds."""
        return self._share

    def hold(self, share: Share) -> None:
        """Records that this rank holds another share. Raises RuntimeError within an epoch."""
        if self._shares:
            raise RuntimeError("the share of a rank cannot change within an epoch")
        self._share = share

    def enter(self, comm: Comm | None, device: str, processor: str) -> None:
        """Uses the ranks of an epoch; without `comm`, this rank only. A collective call. Raises GroupFailed unless the
        ranks hold each part once, and have the same kind of processor.
        """
        own = torch.zeros(1, NUM_PARTS + 1, dtype=torch.long)
        own[0, list(self._share.parts)] = 1
        own[0, NUM_PARTS] = crc32(processor.encode())
        rows = own if comm is None else comm.all_gather(own.to(device)).flatten(0, 1)
        *flags, kinds = rows.T.tolist()
        if len(set(kinds)) > 1:
            raise GroupFailed(
                f"weights: the processors of the ranks differ, and may round differently; this rank has {processor}"
            )
        if wrong := sum(sum(holders) != 1 for holders in flags):
            raise GroupFailed(f"weights: {wrong} of {NUM_PARTS} parts are not held by exactly one rank of the group")
        parts = [tuple(part for part, holders in enumerate(flags) if holders[rank]) for rank in range(len(kinds))]
        self._shares = tuple(Share(one, self._share.count) for one in parts)
        self._order = tuple(sorted(range(len(parts)), key=parts.__getitem__))
        self._comm = comm

    def leave(self) -> None:
        """Drops the ranks of an epoch that has ended."""
        self._comm, self._shares = None, ()

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares of the ranks of this epoch, in rank order. Raises RuntimeError outside of an epoch."""
        if not self._shares:
            raise RuntimeError("a model with sharded weights cannot compute outside of a group")
        return self._shares

    def set_rows(self, *, own: bool) -> None:
        """Sets whether the rows of the next forward pass are own or replicated rows."""
        self._has_own_rows = own

    def all_rows(self, x: Tensor) -> Tensor:
        """The rows to compute: [T, ...] as it is if the rows are replicated, else those of all ranks, [N * T, ...]."""
        if self._comm is None or not self._has_own_rows:
            return x
        return self._comm.all_gather(x.contiguous()).flatten(0, 1)

    def return_results(self, own_RF: Tensor) -> Tensor:
        """The results [N, T, F] that the ranks computed for the rows of this rank. The result is valid until the next
        exchange. Raises RuntimeError outside of an epoch.
        """
        num_ranks, comm = len(self.shares), self._comm
        if comm is None:
            return own_RF.unsqueeze(0)
        if self._has_own_rows:
            return comm.all_to_all(own_RF.contiguous().view(num_ranks, -1, own_RF.shape[-1]))
        return comm.all_gather(own_RF.contiguous())

    def sum_results(self, own_RF: Tensor) -> Tensor:
        """The sums [T, F] of the results that the ranks computed, accumulated in float32."""
        found = self.return_results(own_RF).unbind()
        first, *others = (found[rank] for rank in self._order)
        total = first.to(torch.float32, copy=True)
        for other in others:
            total += other
        return total.to(own_RF.dtype)


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """The places of the outputs of a group of layers in the results of the ranks."""

    shares: tuple[Share, ...]
    widest: int
    """The largest number of outputs of a rank."""
    slices: tuple[tuple[tuple[int, Range], ...], ...]
    """For each layer, the ranks and the ranges of their results that have its outputs, in the order of the outputs."""

    @classmethod
    def of(cls, shares: tuple[Share, ...], sizes: Sequence[int]) -> Self:
        """The layout of layers with these numbers of outputs. Ranks compute their outputs layer by layer."""
        widths = [0] * len(shares)
        slices = list[tuple[tuple[int, Range], ...]]()
        for size in sizes:
            found = list[tuple[int, int, Range]]()
            for rank, share in enumerate(shares):
                for start, end in share.ranges(size):
                    found += [(start, rank, (widths[rank], widths[rank] + end - start))] if start < end else []
                    widths[rank] += end - start
            slices.append(tuple((rank, place) for _, rank, place in sorted(found)))
        return cls(shares, max(widths), tuple(slices))


class OutputGroup:
    """Linear layers that receive the same tensor and share one exchange. The first call computes all of them."""

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange
        self._layers: list[ShardedLinear] = []
        self._input: Tensor | None = None
        self._found: dict[int, Tensor] = {}
        """The outputs that were not collected yet, by layer."""
        self._layout: OutputLayout | None = None

    def add(self, layer: "ShardedLinear") -> int:
        """Adds a layer; returns its number."""
        self._layers.append(layer)
        return len(self._layers) - 1

    def output(self, number: int, x: Tensor) -> Tensor:
        """The output of a layer for `x`."""
        if self._input is not x or number not in self._found:
            self._input, self._found = x, self._compute(x)
        out = self._found.pop(number)
        if not self._found:
            self._input = None
        return out

    def _compute(self, x: Tensor) -> dict[int, Tensor]:
        shares = self._exchange.shares
        if self._layout is None or self._layout.shares is not shares:
            self._layout = OutputLayout.of(shares, [layer.out_features for layer in self._layers])
        layout = self._layout
        rows_RF = self._exchange.all_rows(x.reshape(-1, x.shape[-1]))
        own_RF = torch.cat([layer.local(rows_RF) for layer in self._layers], dim=-1)
        if own_RF.shape[-1] < layout.widest:  # ranks exchange equal shapes
            own_RF = functional.pad(own_RF, (0, layout.widest - own_RF.shape[-1]))
        found_NTF = self._exchange.return_results(own_RF)
        outputs = [
            torch.cat([found_NTF[rank, :, start:end] for rank, (start, end) in slices], dim=-1)
            for slices in layout.slices
        ]
        return {i: out_TF.view(*x.shape[:-1], out_TF.shape[-1]) for i, out_TF in enumerate(outputs)}


class ShardedLinear(nn.Module):
    """A linear layer of which each rank computes some outputs."""

    def __init__(self, local: nn.Module, out_features: int, group: OutputGroup) -> None:
        """`local` computes the outputs of this rank's share."""
        super().__init__()
        self.local = local
        self.out_features = out_features
        self._group = group
        self._number = group.add(self)

    def forward(self, x: Tensor) -> Tensor:
        return self._group.output(self._number, x)


class PairRows:
    """The rows that pass through a pair of linear layers."""

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange
        self._shape = torch.Size()
        self._input: Tensor | None = None
        self._rows: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """The rows to compute of the input `x`, which several first layers receive."""
        if self._rows is None or self._input is not x:
            rows_RF = self._exchange.all_rows(x.reshape(-1, x.shape[-1]))
            self._shape, self._input = x.shape, x
            self._rows = rows_RF.view(*[1] * (x.dim() - 2), *rows_RF.shape)
        return self._rows

    def leave(self, part: Tensor) -> Tensor:
        """The complete output, from the addends of this rank's share."""
        self._input = self._rows = None
        out_TF = self._exchange.sum_results(part.flatten(0, -2))
        return out_TF.view(*self._shape[:-1], -1)


class ShardedPairInput(nn.Module):
    """A first linear layer of a pair: its outputs remain on this rank."""

    def __init__(self, local: nn.Module, rows: PairRows) -> None:
        super().__init__()
        self.local = local
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return self.local(self._rows.enter(x))


class ShardedPairOutput(nn.Module):
    """The second linear layer of a pair, whose inputs are on this rank: outputs are sums over the shares."""

    def __init__(self, local: nn.Module, bias: nn.Parameter | None, rows: PairRows) -> None:
        """`bias` is added once, to the sums."""
        super().__init__()
        self.local = local
        self.bias = bias
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        out = self._rows.leave(self.local(x))
        return out if self.bias is None else out + self.bias


class ShardedEmbedding(nn.Module):
    """An embedding of which each rank holds some words."""

    def __init__(self, plain: nn.Embedding, num_words: int, exchange: RowExchange) -> None:
        """`plain` holds the words of this rank's share, out of `num_words`."""
        super().__init__()
        self.local = copy.copy(plain)
        self.local.padding_idx = None  # it may be a word of another rank, and matters in training only
        self._num_words = num_words
        self._exchange = exchange
        self.follow_share()

    def follow_share(self) -> None:
        """Adapts to the share that this rank holds now."""
        places, offset = torch.full((self._num_words,), -1), 0
        for start, end in self._exchange.share.ranges(self._num_words):
            places[start:end] = torch.arange(offset, offset + end - start)
            offset += end - start
        self._places = places.to(self.local.weight.device)
        """The index of each word in the weights of this rank; -1: another rank has it."""

    @property
    def weight(self) -> Tensor:
        """The words of this rank. Models read the device and the dtype of the weights of their embedding."""
        return self.local.weight

    def forward(self, ids: Tensor) -> Tensor:
        places_R = self._places[self._exchange.all_rows(ids.reshape(-1))]
        found_RF = self.local(places_R.clamp(min=0))
        own_RF = torch.where((places_R >= 0)[:, None], found_RF, torch.zeros_like(found_RF))
        return self._exchange.sum_results(own_RF).view(*ids.shape, -1)


class ShardedExperts(nn.Module):
    """Experts of which each rank holds a slice of each: rows are routed as before, and outputs are sums."""

    def __init__(
        self, local: nn.Module, num_experts: int, exchange: RowExchange, added_once: Sequence[str] = ()
    ) -> None:
        """`local` computes the addends of this rank's share. Experts after the first `num_experts` have no weights.
        `added_once` names biases of the outputs, which the rank with part 0 adds.
        """
        super().__init__()
        self.local = local
        self._num_experts = num_experts
        self._exchange = exchange
        self._biases = {name: local.get_parameter(name).data for name in added_once}
        self.follow_share()

    def follow_share(self) -> None:
        """Adapts to the share that this rank holds now."""
        for name, bias in self._biases.items():
            added = bias if self._exchange.share.has_first else torch.zeros_like(bias)
            self.local.get_parameter(name).data = added

    def forward(self, hidden: Tensor, *routing: Tensor) -> Tensor:
        out_TF = self._routed(hidden, *routing) if routing else self._grouped(hidden)
        return out_TF.view(hidden.shape)

    def _routed(self, hidden: Tensor, ids_TE: Tensor, weights_TE: Tensor) -> Tensor:
        """The outputs of rows, each of which names its experts and their weights."""
        hidden_RF, ids_RE, weights_RE = (
            self._exchange.all_rows(rows).clone() for rows in (hidden.reshape(-1, hidden.shape[-1]), ids_TE, weights_TE)
        )
        if not self._exchange.share.has_first:
            weights_RE = without_weightless(ids_RE, weights_RE, self._num_experts)
        return self._exchange.sum_results(self.local(hidden_RF, ids_RE, weights_RE))

    def _grouped(self, hidden_ETF: Tensor) -> Tensor:
        """The outputs of rows [E * T, F], the same number of each of the E experts."""
        num_experts, num_features = self._num_experts, hidden_ETF.shape[-1]
        rows_NETF = self._exchange.all_rows(hidden_ETF).unflatten(0, (-1, num_experts, len(hidden_ETF) // num_experts))
        rows_ENTF = rows_NETF.transpose(0, 1)
        own_RF: Tensor = self.local(rows_ENTF.reshape(-1, num_features))
        return self._exchange.sum_results(own_RF.view(rows_ENTF.shape).transpose(0, 1).reshape(-1, num_features))


def without_weightless(ids_RE: Tensor, weights_RE: Tensor, num_experts: int) -> Tensor:
    """The weights of routed rows, 0 for experts without weights: those only repeat their input, and add it once."""
    return weights_RE.masked_fill(ids_RE >= num_experts, 0)


def processor_of(device: str) -> str:
    """The kind of a device. Devices of the same kind round alike."""
    if device == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return torch.cuda.get_device_name(device)


def replace_modules(root: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Replaces modules wherever they occur in `root`: replaced attention keeps references to the layers of the original
    one.
    """
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if (replacement := replacements.get(child)) is not None:
                setattr(parent, name, replacement)
