"""Layers whose weights are divided over the ranks. Each computes the same function as the layer that it replaces.

There are two kinds of rows. Replicated rows are the same on every rank: in decode, and in comparisons. Own rows differ
between ranks, which all have the same number of them: in prefill. A layer returns the complete result for the rows that
it is given, so the modules around it do not change.

Addends are summed in the order of the shares, so that all ranks compute the same bits. Models choose experts by these
numbers, and the parts of one expert are on all ranks. For the same reason, ranks must have the same kind of processor:
numbers that each rank computes itself, such as norms, must be equal.

Shape letters: T rows of a rank, R rows to compute (T, or those of all ranks), F features, S shares.
"""

import copy
import platform
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from longleaf.comm import Comm
from longleaf.errors import GroupFailed
from workers.model.weight_shares import Share, share_sizes


class RowExchange:
    """The exchanges of sharded layers with the ranks that hold the other shares."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self._comm: Comm | None = None
        self._ranks: Tensor | None = None
        """The rank that holds each share; None if ranks hold the shares of their numbers."""
        self._has_own_rows = False

    def enter(self, comm: Comm | None, device: str, processor: str) -> None:
        """Uses the ranks of an epoch. A collective call. Raises GroupFailed unless they hold each share once, and have
        the same kind of processor.
        """
        own = torch.tensor([[self.share.index, crc32(processor.encode())]], device=device)
        shares, kinds = (own if comm is None else comm.all_gather(own).flatten(0, 1)).T.tolist()
        if len(set(kinds)) > 1:
            raise GroupFailed(
                f"weights: the processors of the ranks differ, and may round differently; this rank has {processor}"
            )
        if sorted(shares) != list(range(self.share.count)):
            present = ", ".join(map(str, shares))
            raise GroupFailed(
                f"weights: a group needs {self.share.count} ranks with one share each, not shares {present}"
            )
        order = sorted(range(len(shares)), key=shares.__getitem__)
        self._ranks = None if order == shares == sorted(shares) else torch.tensor(order, device=device)
        self._comm = comm

    def leave(self) -> None:
        """Drops the ranks of an epoch that has ended."""
        self._comm = None

    def set_rows(self, *, own: bool) -> None:
        """Sets whether the rows of the next forward pass are own or replicated rows."""
        self._has_own_rows = own

    def all_rows(self, x: Tensor) -> Tensor:
        """The rows to compute: [T, ...] as it is if the rows are replicated, else those of all ranks, [N * T, ...]."""
        return self._group.all_gather(x.contiguous()).flatten(0, 1) if self._has_own_rows else x

    def return_parts(self, part_RF: Tensor) -> Tensor:
        """The parts [S, T, F] that the shares computed for the rows of this rank. The result is valid until the next
        exchange.
        """
        comm = self._group
        if self._has_own_rows:
            found = comm.all_to_all(part_RF.contiguous().view(comm.world_size, -1, part_RF.shape[-1]))
        else:
            found = comm.all_gather(part_RF.contiguous())
        return found if self._ranks is None else found[self._ranks]

    def sum_parts(self, part_RF: Tensor) -> Tensor:
        """The sums [T, F] of the parts that the shares computed, accumulated in float32."""
        first, *others = self.return_parts(part_RF).unbind()
        total = first.to(torch.float32, copy=True)
        for other in others:
            total += other
        return total.to(part_RF.dtype)

    @property
    def _group(self) -> Comm:
        if self._comm is None:
            raise RuntimeError("a model with sharded weights cannot compute outside of a group")
        return self._comm


class OutputGroup:
    """Linear layers that receive the same tensor and share one exchange. The first call computes all of them."""

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange
        self._layers: list[ShardedLinear] = []
        self._input: Tensor | None = None
        self._found: dict[int, Tensor] = {}
        """The outputs that were not collected yet, by layer."""

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
        rows_RF = self._exchange.all_rows(x.reshape(-1, x.shape[-1]))
        part_RF = torch.cat([layer.local(rows_RF) for layer in self._layers], dim=-1)
        sizes = [share_sizes(layer.out_features, self._exchange.share.count) for layer in self._layers]
        of_shares = list(zip(*sizes, strict=True))
        widest = max(map(sum, of_shares))
        if part_RF.shape[-1] < widest:  # ranks exchange equal shapes
            part_RF = functional.pad(part_RF, (0, widest - part_RF.shape[-1]))
        parts_STF = self._exchange.return_parts(part_RF)
        split = [part_TF[:, : sum(own)].split(own, dim=-1) for part_TF, own in zip(parts_STF, of_shares, strict=True)]
        outputs = [torch.cat(parts, dim=-1) for parts in zip(*split, strict=True)]
        return {i: out_TF.view(*x.shape[:-1], out_TF.shape[-1]) for i, out_TF in enumerate(outputs)}


class ShardedLinear(nn.Module):
    """A linear layer of which each rank computes some outputs."""

    def __init__(self, local: nn.Linear, out_features: int, group: OutputGroup) -> None:
        """`local` computes the outputs of this rank's share."""
        super().__init__()
        self.local = local
        self.in_features, self.out_features = local.in_features, out_features
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
        out_TF = self._exchange.sum_parts(part.flatten(0, -2))
        return out_TF.view(*self._shape[:-1], -1)


class ShardedPairInput(nn.Module):
    """A first linear layer of a pair: its outputs remain on this rank."""

    def __init__(self, local: nn.Linear, rows: PairRows) -> None:
        super().__init__()
        self.local = local
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return self.local(self._rows.enter(x))


class ShardedPairOutput(nn.Module):
    """The second linear layer of a pair, whose inputs are on this rank: outputs are sums over the shares."""

    def __init__(self, local: nn.Linear, bias: nn.Parameter | None, rows: PairRows) -> None:
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
        self._start, self._end = exchange.share.bounds(num_words)
        self._exchange = exchange

    @property
    def weight(self) -> Tensor:
        """The words of this rank. Models read the device and the dtype of the weights of their embedding."""
        return self.local.weight

    def forward(self, ids: Tensor) -> Tensor:
        rows_R = self._exchange.all_rows(ids.reshape(-1))
        is_here = (rows_R >= self._start) & (rows_R < self._end)
        found_RF = self.local((rows_R - self._start).clamp(0, self._end - self._start - 1))
        part_RF = torch.where(is_here[:, None], found_RF, torch.zeros_like(found_RF))
        return self._exchange.sum_parts(part_RF).view(*ids.shape, -1)


class ShardedExperts(nn.Module):
    """Experts of which each rank holds a slice of each: rows are routed as before, and outputs are sums."""

    def __init__(self, local: nn.Module, num_experts: int, exchange: RowExchange) -> None:
        """`local` computes the addends of this rank's share. Experts after the first `num_experts` have no weights."""
        super().__init__()
        self.local = local
        self._num_experts = num_experts
        self._exchange = exchange

    def forward(self, hidden: Tensor, *routing: Tensor) -> Tensor:
        out_TF = self._routed(hidden, *routing) if routing else self._grouped(hidden)
        return out_TF.view(hidden.shape)

    def _routed(self, hidden: Tensor, ids_TE: Tensor, weights_TE: Tensor) -> Tensor:
        """The outputs of rows, each of which names its experts and their weights."""
        hidden_RF, ids_RE, weights_RE = (
            self._exchange.all_rows(rows).clone() for rows in (hidden.reshape(-1, hidden.shape[-1]), ids_TE, weights_TE)
        )
        if self._exchange.share.index:
            weights_RE = without_weightless(ids_RE, weights_RE, self._num_experts)
        return self._exchange.sum_parts(self.local(hidden_RF, ids_RE, weights_RE))

    def _grouped(self, hidden_ETF: Tensor) -> Tensor:
        """The outputs of rows [E * T, F], the same number of each of the E experts."""
        num_experts, num_features = self._num_experts, hidden_ETF.shape[-1]
        rows_NETF = self._exchange.all_rows(hidden_ETF).unflatten(0, (-1, num_experts, len(hidden_ETF) // num_experts))
        rows_ENTF = rows_NETF.transpose(0, 1)
        part_RF: Tensor = self.local(rows_ENTF.reshape(-1, num_features))
        return self._exchange.sum_parts(part_RF.view(rows_ENTF.shape).transpose(0, 1).reshape(-1, num_features))


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
