"""A chunk or row over keys that are dealt over ranks."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from coordinator.kv_cache.block_placer import BlockPlacer
from longleaf.attention import reference
from longleaf.config import MergeName
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.merge import CountedMerge, PartialCodec, make_merge
from longleaf.rank_protocol.group_messages import SegmentLayout
from longleaf.rank_protocol.step import Decode, Prefill, Row
from longleaf.runs import Run
from longleaf.topology import Topology
from tests.support.attention.dense import reaches, visible
from tests.support.counting_comm import CountingComm
from tests.support.loopback import loopback_groups
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.slots import FloatKvPool
from workers.model.hook import LayerCall
from workers.model.model import LayerSpec
from workers.step.forward import DecodeStep, Peers, PrefillStep
from workers.step.gathered_prefill import PastBuilder
from workers.step.inputs import InputBuilder
from workers.step.last_tokens import HostIds

BLOCK = 4
NUM_BLOCKS = 40
SCALE = 0.6
BACKEND = NativeBackend()


@dataclass(frozen=True)
class Case:
    """A path of segments whose keys are dealt over ranks, and new tokens [start, end) that attend to it."""

    world_size: int
    seed: int
    lengths: tuple[int, ...]
    """Tokens of each segment; the last ones are new."""
    spec: LayerSpec
    softcap: float | None
    has_sink: bool

    @property
    def path(self) -> tuple[int, ...]:
        return tuple(range(len(self.lengths)))

    @property
    def start(self) -> int:
        return sum(self.lengths[:-1])

    @property
    def end(self) -> int:
        return sum(self.lengths)

    def call(self) -> LayerCall:
        sink_H = torch.linspace(-1, 4, self.spec.num_heads) if self.has_sink else None
        return LayerCall(SCALE, self.spec.reach.window, self.softcap, sink_H, None)

    def tensors(self, dtype=torch.float32):
        """Queries [S, H, D], keys [S, K, D] and values [S, K, V] of all positions."""
        generator, spec = torch.Generator().manual_seed(self.seed), self.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        q, k, v = (torch.randn(self.end, n, spec.head_dim, generator=generator).to(dtype) for n in heads)
        return q, k, (v if spec.latent_dim is None else k)[..., : spec.value_dim]

    def rows(self, positions_T, dtype=torch.float32):
        """The same of some positions as layers hand them over: [T, H, D], [K, T, D] and [K, T, V]."""
        q, k, v = (t[positions_T] for t in self.tensors(dtype))
        keys = k.transpose(0, 1)
        return q, keys, v.transpose(0, 1) if self.spec.latent_dim is None else keys[..., : self.spec.value_dim]

    def runs(self, *, in_rows: bool) -> list[tuple[Run, ...]]:
        """Runs of each segment: chunks of any size, or rows where the new tokens are rows."""
        dice, placer = random.Random(self.seed), BlockPlacer([NUM_BLOCKS] * self.world_size, BLOCK)
        reservation = placer.reserve(placer.num_blocks)
        assert reservation is not None
        found, start = [], 0
        for turn, length in enumerate(self.lengths):
            is_new = turn == len(self.lengths) - 1
            if in_rows if is_new else dice.random() < 0.3:
                found.append(placer.grow(None, start, length, reservation))
            else:
                found.append(placer.place_chunk(start, start + length, turn + dice.randrange(2), reservation))
            start += length
        return found

    def expected(self, keys=None, dtype=torch.float32):
        """Out [T, H, D] of the new tokens, over other keys and values [S, K, D] if they are given."""
        q, k, v = self.tensors(dtype)
        k, v = keys or (k, v)
        mask = visible(range(self.start, self.end), range(self.end), self.spec.reach)
        options = {"softcap": self.softcap, "sink_H": self.call().sink_H}
        return reference.attend(q[self.start :], k, v, mask, SCALE, **options).out_THD


def layouts(runs):
    """The layouts of segments with these runs."""
    return [SegmentLayout(segment, resident[0].start, tuple(resident)) for segment, resident in enumerate(runs)]


def lose(case):
    """The new tokens with some runs lost: the remaining layouts, and pieces that recompute the lost runs, at most one
    per rank and on other ranks than before.
    """
    dice = random.Random(case.seed)
    placer = BlockPlacer([4 * NUM_BLOCKS] * case.world_size, BLOCK)
    reservation = placer.reserve(placer.num_blocks)
    assert reservation is not None
    runs, start = [], 0
    for turn, length in enumerate(case.lengths):
        size = dice.choice([BLOCK, 3 * BLOCK, 8 * BLOCK])
        cuts = [*range(start, start + length, size), start + length]
        parts = zip(cuts[:-1], cuts[1:], strict=True)
        runs.append([run for part in parts for run in placer.place_chunk(*part, turn, reservation)])
        start += length
    lost = sorted(dice.sample(range(len(runs[-1])), min(len(runs[-1]), dice.randint(1, case.world_size))))
    ranks = dice.sample(range(case.world_size), len(lost))
    pieces = tuple(
        Run(rank, run.start, run.end, placer.pools[rank].allocate(len(run.blocks)))
        for rank, run in zip(ranks, [runs[-1][i] for i in lost], strict=True)
    )
    resident = layouts(runs)
    retained = tuple(run for i, run in enumerate(runs[-1]) if i not in lost)
    return [*resident[:-1], SegmentLayout(resident[-1].segment, resident[-1].start, retained)], pieces


def builder(case, rank, resident, way, dtype=torch.float32, kind=FloatKvPool, num_blocks=NUM_BLOCKS):
    """One rank's inputs, and its pool with the resident keys and values; slots that must not be read are NaN."""
    layers = {0: case.spec}
    pool, block_table = kind(layers, num_blocks, BLOCK, dtype, "cpu"), BlockTable(rank, BLOCK)
    _, k, v = case.tensors(dtype)
    for tensor in (pool.keys[0], pool.values[0]) if kind is FloatKvPool else ():
        tensor.fill_(float("nan"))
    block_table.replace(resident)
    for run in (run for layout in resident for run in layout.runs):
        if run.rank == rank:
            slots = [run.blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(len(run))]
            keys, values = (t[run.start : run.end].transpose(0, 1) for t in (k, v))
            pool.store(BACKEND, 0, torch.tensor(slots), keys, values)
    size = case.world_size
    pasts = PastBuilder(block_table, pool, layers, world_size=size, way=way, wire=PartialCodec(BACKEND))
    return InputBuilder(block_table, pool, layers, world_size=size, pasts=pasts), pool


def peers_of(case, merge, groups):
    """The peers of a rank that merges in `groups`."""
    wire = PartialCodec(BACKEND)
    return (
        Peers("cpu", groups.world, CountedMerge(make_merge(merge, groups, wire), wire))
        if case.world_size > 1
        else Peers("cpu")
    )


def on_ranks(case, work):
    groups = loopback_groups(Topology(("here",) * case.world_size))
    with ThreadPoolExecutor(case.world_size) as threads:
        return list(threads.map(work, range(case.world_size), groups))


def prefill(case, way, merge: MergeName = "gather", dtype=torch.float32, kind=FloatKvPool):
    """Out of the new tokens as a chunk, [T, H, D], and the bytes that each rank sent."""
    runs = case.runs(in_rows=False)
    return read(case, layouts(runs[:-1]), runs[-1], way, merge, dtype, kind)


def read(case, resident, pieces, way, merge: MergeName, dtype=torch.float32, kind=FloatKvPool):
    """Out of the tokens of pieces, [T, H, D], where some keys are held, and the bytes that each rank sent."""
    ids = tuple(position for piece in pieces for position in range(piece.start, piece.end))
    chunk = Prefill(case.path, pieces[0].start, ids, pieces)

    def work(rank, groups):
        make, pool = builder(case, rank, resident, way, dtype, kind, 4 * NUM_BLOCKS)
        inputs, comm = make.prefill(chunk), CountingComm(groups.world)
        mine = inputs.num_own_tokens
        assert inputs.token_ids_T[:mine].tolist() == inputs.positions_T[:mine].tolist()
        counted = type(groups)(groups.topology, comm, comm, None)
        step = PrefillStep(inputs, pool, BACKEND, peers_of(case, merge, counted), last_layer=1)
        q, k, v = case.rows(inputs.positions_T, dtype)
        return step.attend(0, q, k, v, case.call()), comm.bytes_sent

    found = on_ranks(case, work)
    return torch.cat([found[run.rank][0][: len(run)] for run in pieces]), {sent for _, sent in found}


def decode(case, merge, kind=FloatKvPool, dtype=torch.float32):
    """Out of the new tokens as rows, [T, H, D], from each rank."""
    runs = case.runs(in_rows=True)
    ids = tuple(range(case.start, case.end))
    rows = Decode((Row(0, case.path, case.start, ids, runs[-1], 0),))

    def work(rank, groups):
        make, pool = builder(case, rank, layouts(runs[:-1]), "auto", dtype, kind)
        inputs = make.decode(rows, HostIds())
        step = DecodeStep(inputs, pool, BACKEND, peers_of(case, merge, groups))
        q, k, v = case.rows(inputs.positions_T, dtype)
        return step.attend(0, q, k, v, case.call())

    return on_ranks(case, work)


def cases(most_new=40):
    spec = st.builds(
        lambda kv_heads, group, dim, reach, values: LayerSpec(kv_heads * group, kv_heads, dim, reach, **values),
        st.integers(1, 2),
        st.integers(1, 4),
        st.sampled_from([8, 16]),
        reaches(most=20),
        st.sampled_from([{}, {}, {"latent_dim": 5}, {"own_value_dim": 5}]),
    )
    lengths = st.tuples(st.lists(st.integers(1, 40), max_size=3), st.integers(1, most_new))
    return st.builds(
        Case,
        world_size=st.integers(1, 4),
        seed=st.integers(0, 2**31),
        lengths=lengths.map(lambda pair: (*pair[0], pair[1])),
        spec=spec,
        softcap=st.sampled_from([None, 1.5, 30.0]),
        has_sink=st.booleans(),
    )
