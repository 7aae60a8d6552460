"""Attention in rings, only to compare: keys that travel past queries, and queries that travel past keys.

Sources: Ring Attention (arXiv 2310.01889) and the pass-Q ring of Context Parallelism (arXiv 2411.01783), here for
decode rows, which every rank has and whose result every rank needs. Rank r sends to rank r + 1.

Shape letters: T rows, H query heads, h heads of one share, K key heads, S keys of one rank, D dim, C columns of a
packed row. Keys and values of a rank lie in one tensor, kv_2KSD, so that one message carries both.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.harness.async_comm import AsyncComm, Transfer
from longleaf.attention import Partial, merge
from longleaf.attention.masks import Read
from longleaf.attention.packed import pack, unpack
from longleaf.comm import Comm
from longleaf.kernels.backend import Backend
from longleaf.runs import ceil_div


class Ring:
    """Ring attention: keys go round, un-repeated, and every rank attends with all queries to all of them.

    N - 1 hops. While a rank computes on one block, the next one arrives: it holds two blocks beside its own.
    """

    def __init__(
        self,
        comm: AsyncComm,
        backend: Backend,
        lengths: Sequence[int],
        *,
        num_kv_heads: int,
        dim: int,
        device: str = "cpu",
    ) -> None:
        """`lengths` are the numbers of keys of all ranks: blocks travel at their true length, without padding."""
        if len(lengths) != comm.world_size:
            raise ValueError(f"lengths: {len(lengths)} numbers for {comm.world_size} ranks")
        self._comm = comm
        self._backend = backend
        self._shapes = [torch.Size((2, num_kv_heads, length, dim)) for length in lengths]
        size = max(shape.numel() for shape in self._shapes)
        self._buffers = [torch.empty(size, device=device) for _ in range(min(2, comm.world_size - 1))]

    def attend(self, q_THD: Tensor, kv_2KSD: Tensor, scale: float) -> Partial:
        """Attention over all keys, on every rank; each joins the blocks in another order, so equal to rounding only."""
        transfer = self._start(kv_2KSD, 1)
        part = over(self._backend, q_THD, kv_2KSD, scale)
        for hop in range(1, self._comm.world_size):
            transfer.wait()
            kv_2KSD = self._block(hop)
            transfer = self._start(kv_2KSD, hop + 1)
            part = merge(part, over(self._backend, q_THD, kv_2KSD, scale))
        return part

    def _start(self, kv_2KSD: Tensor, hop: int) -> Transfer:
        """Passes a block on and receives that of this hop, unless all have been round."""
        comm = self._comm
        if hop == comm.world_size:
            return Transfer(())
        return comm.start_permute(kv_2KSD, self._block(hop), *ring_peers(comm))

    def _block(self, hop: int) -> Tensor:
        """Where the block that arrives with this hop lies: the other buffer than that of the hop before."""
        shape = self._shapes[(self._comm.rank - hop) % self._comm.world_size]
        return self._buffers[(hop - 1) % 2][: shape.numel()].view(shape)


class QueryRing:
    """Pass-Q: a query travels around the ring with its partial, and each rank adds the contribution of its keys.

    The heads are cut into N shares, one of which starts at each rank, so that all ranks compute at every hop. After N -
    1 hops each share is finished on some rank, and one all-gather distributes all shares: one exchange instead of the N
    - 1 of a second round.
    """

    def __init__(self, comm: Comm, backend: Backend) -> None:
        self._comm = comm
        self._backend = backend

    def attend(self, q_THD: Tensor, kv_2KSD: Tensor, scale: float) -> Partial:
        """Attention over all keys, the same bits on every rank."""
        comm, (num_rows, num_heads, dim) = self._comm, q_THD.shape
        share = ceil_div(num_heads, comm.world_size)
        first = comm.rank * share
        q_ThD = F.pad(q_THD, (0, 0, 0, share * comm.world_size - num_heads))[:, first : first + share]
        part = self._over(q_ThD, first, num_heads, kv_2KSD, scale)
        for hop in range(1, comm.world_size):
            packed_ThC = comm.permute(torch.cat([q_ThD, pack(part, torch.float32)], dim=-1), *ring_peers(comm))
            q_ThD, so_far = packed_ThC[..., :dim], unpack(packed_ThC[..., dim:])
            first = (comm.rank - hop) % comm.world_size * share
            part = merge(so_far, self._over(q_ThD, first, num_heads, kv_2KSD, scale))
        shares_NThC = comm.all_gather(pack(part, torch.float32))
        # share r was finished by the rank before r, the last one that it came to
        all_THC = shares_NThC.roll(1, dims=0).transpose(0, 1).reshape(num_rows, -1, dim + 1)[:, :num_heads]
        return unpack(all_THC)

    def _over(self, q_ThD: Tensor, first: int, num_heads: int, kv_2KSD: Tensor, scale: float) -> Partial:
        """The partial of heads from `first` on over this rank's keys; the identity for heads beyond the last."""
        group = num_heads // kv_2KSD.shape[1]
        end = min(first + q_ThD.shape[1], num_heads)
        parts: list[Partial] = []
        for key_head in range(first // group, ceil_div(end, group)):
            heads = slice(max(key_head * group, first) - first, min((key_head + 1) * group, end) - first)
            parts.append(over(self._backend, q_ThD[:, heads], kv_2KSD[:, key_head : key_head + 1], scale))
        num_rows, share, dim = q_ThD.shape
        parts.append(Partial.identity(num_rows, share - max(end - first, 0), dim, device=str(q_ThD.device)))
        return Partial(torch.cat([p.out_THD for p in parts], 1), torch.cat([p.lse_TH for p in parts], 1))


def over(backend: Backend, q_THD: Tensor, kv_2KSD: Tensor, scale: float) -> Partial:
    """All queries over all keys of a block, each seeing each."""
    keys_KSD, values_KSD = kv_2KSD
    return backend.attend(q_THD, keys_KSD, values_KSD, [Read(0, len(q_THD), 0, keys_KSD.shape[1])], scale)


def ring_peers(comm: Comm) -> tuple[int, int]:
    """The ranks to send to and to receive from."""
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
