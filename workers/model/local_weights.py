"""The weights that a rank holds, which change when ranks are lost or join.

A rank that is to hold other parts reads only missing ones. If none is missing, surplus parts remain in memory until the
epoch in which another rank uses them has begun. If that rank is lost before, nothing is read again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longleaf.kernels.cpu.quantized_linear import QuantizedLinear
from longleaf.kernels.quantized_matrix import QuantizedMatrix
from longleaf.shares import NUM_PARTS
from workers.model.sharded_layers import RowExchange, ShardedEmbedding, ShardedExperts
from workers.model.stored_weights import select_matrix
from workers.model.weight_shares import Cut, Range, Share, growth_bytes, select

Values = Tensor | QuantizedMatrix
"""The values of a parameter, with the dims of the checkpoint."""
ReadParts = Callable[[Share], tuple[dict[str, Values], int]]
"""Reads a share of the divided parameters from the checkpoint. Returns them by name, and the bytes that were read. Tied
parameters may be under one of their names only."""


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """The place in a model of a rank's share of a parameter."""

    layer: Any
    """A sharded layer, whose `local` has the parameter."""
    leaf: str
    cut: Cut
    size: int
    """Number of elements of the whole parameter in the dim of the cut."""
    is_transposed: bool = False
    """Whether the dims of the model are those of the checkpoint in reverse."""

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.layer.local, self.leaf)

    @property
    def identity(self) -> int:
        """The same for tied parameters."""
        return id(self.parameter)

    @property
    def num_bytes(self) -> int:
        return self.parameter.nbytes

    @property
    def values(self) -> Values:
        """The values, with the dims of the checkpoint."""
        return self.parameter.data.T if self.is_transposed else self.parameter.data

    def assigned(self, values: Values) -> Any:
        """The parameter of the model with these values, which have the dims of the checkpoint."""
        assert isinstance(values, Tensor)
        return nn.Parameter(values.T.contiguous() if self.is_transposed else values, requires_grad=False)

    def assign(self, parameter: Any) -> None:
        """Replaces the parameter of the model by another one, with the dims of the model."""
        local = self.layer.local
        setattr(local, self.leaf, parameter)
        if isinstance(local, nn.Linear) and self.leaf == "weight":
            local.out_features, local.in_features = parameter.shape


@dataclass(frozen=True, slots=True)
class LocalMatrix:
    """The place in a model of a rank's share of a weight that remains quantized."""

    layer: Any
    """A sharded layer, whose `local` is a `QuantizedLinear`."""
    cut: Cut
    size: int
    """As in `LocalParameter`."""

    @property
    def identity(self) -> int:
        return id(self.layer)

    @property
    def num_bytes(self) -> int:
        return self.layer.local.matrix.num_bytes

    @property
    def values(self) -> Values:
        return self.layer.local.matrix

    def assigned(self, values: Values) -> Any:
        """The matrix of the model."""
        assert isinstance(values, QuantizedMatrix)
        return values

    def assign(self, matrix: Any) -> None:
        """Replaces the layer by one with another matrix."""
        old = self.layer.local
        self.layer.local = QuantizedLinear(matrix, old.bias, old.dtype, old.kernel)


LocalPlace = LocalParameter | LocalMatrix


class LocalWeights:
    """The divided parameters of one rank."""

    def __init__(self, places: Mapping[str, LocalPlace], exchange: RowExchange, read: ReadParts) -> None:
        """`places` by the names of the checkpoint."""
        self._exchange = exchange
        self._read = read
        self._tied = dict[int, list[tuple[str, LocalPlace]]]()
        """The names and places of each parameter: several where parameters are tied."""
        for name, place in places.items():
            self._tied.setdefault(place.identity, []).append((name, place))
        layers = dict.fromkeys(place.layer for place in places.values())
        self._followers = [layer for layer in layers if isinstance(layer, ShardedEmbedding | ShardedExperts)]
        self._surplus = Share((), exchange.share.count)
        """The parts in memory that the model does not use."""
        self._unused = dict[str, Values]()
        """The values of these parts, by the first name of the parameter."""

    @property
    def share(self) -> Share:
        """The parts that the model uses."""
        return self._exchange.share

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The divided parameters that are not quantized; tied ones once."""
        places = [ties[0][1] for ties in self._tied.values()]
        return [place.parameter for place in places if isinstance(place, LocalParameter)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the divided parameters; of tied ones once."""
        return sum(ties[0][1].num_bytes for ties in self._tied.values())

    def room(self, num_parts: int) -> int:
        """Bytes that are needed to hold so many parts, beside those that are held."""
        sizes = [ties[0][1].num_bytes for ties in self._tied.values()]
        return growth_bytes(sizes, len(self.share.parts), num_parts)

    def must_read(self, parts: Sequence[int]) -> bool:
        """Whether some of these parts are not in memory."""
        return not {*parts} <= {*self.share.parts, *self._surplus.parts}

    @torch.no_grad()
    def hold(self, parts: Sequence[int]) -> int:
        """Uses these parts from now on, and reads those that are not in memory. Returns the bytes that were read.
        Raises RuntimeError within an epoch, and the errors of reading.
        """
        old, count = self.share, self.share.count
        new, present = Share(tuple(sorted(parts)), count), {*old.parts, *self._surplus.parts}
        if new == old:
            return 0
        missing = Share(tuple(part for part in new.parts if part not in present), count)
        unused = () if missing.parts else tuple(sorted(present.difference(new.parts)))
        surplus = Share(unused, count)
        found, num_bytes = self._read(missing) if missing.parts else (dict[str, Values](), 0)
        self._exchange.hold(new)
        for ties in self._tied.values():
            name, place = ties[0]
            read = next((found.pop(one) for one, _ in ties if one in found), None)
            memory = [(old, place.values), (self._surplus, self._unused.pop(name, None)), (missing, read)]
            cut, size = place.cut, place.size
            sources = [(cut.ranges(size, share), values) for share, values in memory if values is not None]
            if surplus.parts:
                self._unused[name] = _select(cut.ranges(size, surplus), sources, cut.dim)
            assigned = place.assigned(_select(cut.ranges(size, new), sources, cut.dim))
            del memory, sources, read
            for _, tied in ties:
                tied.assign(assigned)
        self._surplus = surplus
        for layer in self._followers:
            layer.follow_share()
        return num_bytes

    def drop_surplus(self) -> None:
        """Releases the parts that the model does not use."""
        self._surplus = Share((), self.share.count)
        self._unused.clear()


def _select(wanted: Sequence[Range], sources: Sequence[tuple[Sequence[Range], Any]], dim: int) -> Values:
    """The wanted ranges from sources of the same type."""
    return (select_matrix if isinstance(sources[0][1], QuantizedMatrix) else select)(wanted, sources, dim)


def describe_share(share: Share) -> str:
    """The number of parts of a share, for messages."""
    return f"{len(share.parts)} of {NUM_PARTS} parts"
