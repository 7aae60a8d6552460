"""The ranks of an epoch, as a step exchanges with them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longleaf.attention import Partial
from longleaf.comm import Comm, Groups
from longleaf.config import EngineConfig
from longleaf.merge import CountedMerge, PartialCodec, choose_merge, make_merge
from longleaf.rank_protocol.group_messages import MergeTiming
from workers.model.model import Model


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
        return self.smallest(int(is_so)) == 1

    def pop_merge_bytes(self) -> int:
        """Bytes merged since the last call. A replayed step counts nothing."""
        return self.merge.pop_num_bytes() if self.merge else 0


def make_peers(
    model: Model,
    config: EngineConfig,
    device: str,
    groups: Groups | None,
    wire: PartialCodec,
    timings: Sequence[MergeTiming],
) -> Peers:
    """The peers in `groups`, with the configured merge of the partials of the model. A collective. `timings` were
    measured by other groups.
    """
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
