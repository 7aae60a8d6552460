"""One decode step's attention in several ways, on one rank.

Shape letters: H query heads, K key heads, S keys of one rank, D dim, 2 for keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.attention.ring import QueryRing, Ring, over
from bench.harness.memory import peak_bytes
from bench.harness.ranks import Rank
from longleaf.attention import Partial
from longleaf.kernels import registry
from longleaf.kernels.backend import Backend
from longleaf.merge import AutotunedMerge, Merge, PartialCodec, choose_merge, make_merge

ONE_DEVICE, TREE, PAPER, RING, QUERY_RING = "one_device", "tree", "paper", "ring", "ring_pass_q"
MIN_TURNS = 3
COUNTED_SECONDS, MIN_COUNTED, MAX_COUNTED = 2.0, 2, 20
"""How long bytes are counted, and how many steps at least and at most."""
TOLERANCE = 1e-4

Key = tuple[str, str]
"""Method and transport."""
Method = Callable[[], Partial | None]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """One query row over `context_tokens` keys."""

    context_tokens: int
    heads: int
    kv_heads: int
    dim: int

    def lengths(self, world_size: int) -> list[int]:
        """Keys of each rank; they differ by one at most."""
        bounds = [self.context_tokens * rank // world_size for rank in range(world_size + 1)]
        return [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    def key_bytes(self, num_keys: int) -> int:
        """Of so many keys with their values, in float32."""
        return 2 * self.kv_heads * num_keys * self.dim * 4


class Step:
    """The step of one size. Every rank holds its share of the keys, and rank 0 besides all of them, for one device."""

    def __init__(self, rank: Rank, size: Size, backend: Backend, chosen: dict[str, AutotunedMerge]) -> None:
        self._rank = rank
        self._size = size
        self._backend = backend
        self._scale = size.dim**-0.5
        self._q_1HD = torch.randn(1, size.heads, size.dim, generator=torch.Generator().manual_seed(0))
        self._kv_2KSD = self._shard(rank.rank)
        self._all_2KSD = torch.cat([self._shard(r) for r in range(rank.world_size)], 2) if rank.rank == 0 else None
        plain = rank.groups[rank.world.transport]
        self._merges: dict[Key, Merge] = {(TREE, transport): merge for transport, merge in chosen.items()}
        self._merges[PAPER, rank.world.transport] = make_merge("paper", plain, PartialCodec(backend))

    @property
    def keys(self) -> list[Key]:
        """All methods."""
        plain = self._rank.world.transport
        return [(ONE_DEVICE, plain), *self._merges, (RING, plain), (QUERY_RING, plain)]

    def method(self, key: Key) -> Method:
        """A method's work in one step, with separate buffers."""
        name, comm, size = key[0], self._rank.world, self._size
        inputs = self._q_1HD, self._kv_2KSD, self._scale
        if name == ONE_DEVICE:
            return self.on_one_device
        if name == RING:
            lengths = size.lengths(comm.world_size)
            ring = Ring(comm, self._backend, lengths, num_kv_heads=size.kv_heads, dim=size.dim)
            return partial(ring.attend, *inputs)
        if name == QUERY_RING:
            return partial(QueryRing(comm, self._backend).attend, *inputs)
        return partial(self._in_tree, self._merges[key])

    def on_one_device(self) -> Partial | None:
        """Rank 0 attends to all keys without the other ranks."""
        if self._all_2KSD is None:
            return None
        return over(self._backend, self._q_1HD, self._all_2KSD, self._scale)

    def _in_tree(self, merge: Merge) -> Partial:
        return merge.to_all(over(self._backend, self._q_1HD, self._kv_2KSD, self._scale))

    def _shard(self, rank: int) -> Tensor:
        """A rank's keys and values, which follow from its number."""
        length = self._size.lengths(self._rank.world_size)[rank]
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(2, self._size.kv_heads, length, self._size.dim, generator=generator)


def measure(rank: Rank, sizes: list[Size], repeats: int, seconds: float) -> list[Row]:
    """The measurements of each method on this rank, by size; `seconds` is the approximate time limit for the turns of
    one size."""
    backend, size = registry.choose("auto", "cpu", torch.float32), sizes[0]
    chosen = {
        t: choose_merge(groups, PartialCodec(backend), size.heads, size.dim, "cpu") for t, groups in rank.groups.items()
    }
    return [_measure_size(rank, size, backend, chosen, repeats, seconds) for size in sizes]


def _measure_size(
    rank: Rank, size: Size, backend: Backend, chosen: dict[str, AutotunedMerge], repeats: int, seconds: float
) -> Row:
    step = Step(rank, size, backend, chosen)
    peaks = {key: _peak(rank, step, key) for key in step.keys}
    methods = {key: step.method(key) for key in step.keys}
    check(rank, methods)
    probe = {key: max(rank.gather(times[0])) for key, times in rank.take_turns(methods, repeats=1, warm_up=0).items()}
    turns = min(repeats, max(MIN_TURNS, int(seconds / sum(probe.values()))))
    sent: dict[Key, dict[str, float]] = {}
    for key, method in methods.items():
        counted = min(MAX_COUNTED, max(MIN_COUNTED, int(COUNTED_SECONDS / probe[key])))
        sent[key] = rank.count_bytes(method, counted)
    return {
        "seconds": rank.take_turns(methods, repeats=turns, warm_up=0),
        "peaks": peaks,
        "sent": sent,
        "merges": {transport: merge.timings[0].merge for transport, merge in chosen.items()},
    }


def _peak(rank: Rank, step: Step, key: Key) -> int | None:
    """The peak of one step with buffers that are made for it; all ranks work, as they do when timed."""
    rank.barrier()
    return peak_bytes(lambda: step.method(key)())


def check(rank: Rank, methods: dict[Key, Method]) -> None:
    """Methods with wrong results are not measured: raises AssertionError where a method differs from one device."""
    results = {key: result.out_THD.clone() for key, method in methods.items() if (result := method()) is not None}
    wanted = results.get((ONE_DEVICE, rank.world.transport), torch.zeros_like(results[RING, rank.world.transport]))
    expected = rank.world.broadcast(wanted)
    for found in results.values():
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
