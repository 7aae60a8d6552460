"""Windowed layers whose keys each rank holds itself: chunks and rows on a tree of segments, against a dense mask."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.kv_cache.block_placer import BlockPlacer
from longleaf.attention import reference
from longleaf.kernels.backend import lies_in
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.merge import CountedMerge, PartialCodec, make_merge
from longleaf.positions import AttentionSpan, WindowSpec
from longleaf.rank_protocol.step import Decode, Prefill, Row
from longleaf.topology import Topology
from tests.support.attention.dense import reaches, visible
from tests.support.counting_comm import CountingComm
from tests.support.loopback import loopback_groups
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.quantized import QuantizedPool
from workers.kv_cache.slots import FloatKvPool
from workers.model.hook import LayerCall
from workers.model.model import LayerSpec
from workers.step.forward import DecodeStep, Peers, PrefillDone, PrefillStep
from workers.step.gathered_prefill import PastBuilder
from workers.step.inputs import InputBuilder
from workers.step.last_tokens import HostIds
from workers.step.windows import WindowBuilder

BLOCK, NUM_BLOCKS = 4, 200
NUM_HEADS, DIM = 4, 8
SCALE = 0.6
BACKEND = NativeBackend()
SINK_H = torch.linspace(-1, 4, NUM_HEADS)


class Move(NamedTuple):
    """Tokens that come in one step: a chunk or a row."""

    is_chunk: bool
    length: int
    parent: int | None
    """None: the tokens extend the last segment. Otherwise a new segment, which continues the segment of this index; -1:
    which continues none.
    """


@dataclass(frozen=True)
class Case:
    world_size: int
    seed: int
    reaches: tuple[AttentionSpan, ...]
    """The span of each layer."""
    moves: tuple[Move, ...]
    latent_dim: int | None = None
    own_value_dim: int | None = None

    @property
    def layers(self) -> dict[int, LayerSpec]:
        num_kv_heads = 2 if self.latent_dim is None else 1
        dims = (self.latent_dim, self.own_value_dim)
        return {i: LayerSpec(NUM_HEADS, num_kv_heads, DIM, r, *dims) for i, r in enumerate(self.reaches)}

    @property
    def windowed(self) -> dict[int, LayerSpec]:
        return {i: spec for i, spec in self.layers.items() if not spec.reach.is_full}

    @property
    def windows(self) -> WindowSpec:
        reaches = tuple(reach for reach in self.reaches if not reach.is_full)
        return WindowSpec(reaches=reaches, num_blocks=NUM_BLOCKS)


class Rank:
    """The real parts of a rank, over a pool whose unwritten slots are NaN."""

    def __init__(self, case, rank, groups, kind):
        self.pool = kind(case.layers, NUM_BLOCKS, BLOCK, torch.float32, "cpu", NUM_BLOCKS)
        for tensor in (*self.pool.keys.values(), *self.pool.values.values()) if kind is FloatKvPool else ():
            tensor.fill_(float("nan"))
        block_table, size = BlockTable(rank, BLOCK), case.world_size
        sharded = {i: spec for i, spec in case.layers.items() if i not in case.windowed}
        windows = WindowBuilder(block_table, case.windowed, world_size=size, device="cpu")
        pasts = PastBuilder(block_table, self.pool, sharded, world_size=size, way="auto", wire=PartialCodec(BACKEND))
        self.inputs = InputBuilder(block_table, self.pool, case.layers, world_size=size, pasts=pasts, windows=windows)
        self.comm = CountingComm(groups.world)
        counted = type(groups)(groups.topology, self.comm, self.comm, None)
        wire = PartialCodec(BACKEND)
        merge = CountedMerge(make_merge("gather", counted, wire), wire)
        self.peers = Peers("cpu", self.comm, merge) if case.world_size > 1 else Peers("cpu")

    def execute(self, work, tokens):
        """Positions of the rows here, with the result of each layer for them and the bytes that it sent; `tokens` are
        the queries [T, H, D], keys [K, T, D] and values of each layer.
        """
        if isinstance(work, Prefill):
            inputs, start = self.inputs.prefill(work), work.start
            step = PrefillStep(inputs, self.pool, BACKEND, self.peers, last_layer=len(tokens) - 1)
        else:
            inputs, start = self.inputs.decode(work, HostIds()), work.rows[0].start
            step = DecodeStep(inputs, self.pool, BACKEND, self.peers)
        rows = (inputs.positions_T - start).clamp(min=0)  # padding is at position 0
        found = []
        for layer, (q, k, v) in enumerate(tokens):
            before, call = self.comm.bytes_sent, LayerCall(SCALE, None, None, SINK_H, None)
            keys = k[:, rows]
            values = keys[..., : v.shape[2]] if lies_in(v, k) else v[:, rows]
            try:
                out = step.attend(layer, q[rows], keys, values, call)
            except PrefillDone:
                break
            found.append((out, self.comm.bytes_sent - before))
        mine = [
            p for run in getattr(work, "pieces", ()) if run.rank == self.comm.rank for p in range(run.start, run.end)
        ]
        return mine if isinstance(work, Prefill) else inputs.positions_T.tolist(), found


class Story:
    """Follows the moves of a case on all ranks."""

    def __init__(self, case, kind=FloatKvPool):
        self.case = case
        groups = loopback_groups(Topology(("here",) * case.world_size))
        self.ranks = [Rank(case, rank, group, kind) for rank, group in enumerate(groups)]
        self.placer = BlockPlacer([NUM_BLOCKS] * case.world_size, BLOCK, case.windows)
        self.reservation = self.placer.reserve(self.placer.num_blocks)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.paths, self.ends = [], []
        self.last_run, self.window_runs = None, ()
        self.tokens = []
        """By segment and layer: keys [K, S, D] and values [K, S, V]."""

    def follow(self):
        """The result of each layer of each rank for its rows, [T, H, V], that of a dense mask, and the bytes sent."""
        for turn, move in enumerate(self.case.moves):
            segment, start = self.begin(move)
            end = self.ends[segment] = start + move.length
            tokens = [self.draw(spec, move.length) for spec in self.case.layers.values()]
            resident = self.tokens[segment] or [(k[:, :0], v[:, :0]) for _, k, v in tokens]
            self.tokens[segment] = [
                (torch.cat((old_k, k), 1), torch.cat((old_v, v), 1))
                for (old_k, old_v), (_, k, v) in zip(resident, tokens, strict=True)
            ]
            work = self.work(turn, move, segment, start, end)
            with ThreadPoolExecutor(self.case.world_size) as threads:
                done = [threads.submit(rank.execute, work, tokens) for rank in self.ranks]
            for positions, found in (future.result() for future in done):
                for layer, (out, sent) in enumerate(found):
                    rows = [p - start for p in positions]
                    yield layer, out[: len(rows)], self.expected(segment, start, layer, tokens[layer][0])[rows], sent

    def begin(self, move):
        """The segment of the next tokens, and its end; a previous segment is sealed without a message to the ranks."""
        if move.parent is not None or not self.paths:
            if self.paths:
                self.placer.window_pool.trim(self.window_runs, self.ends[-1])
            parent = move.parent % len(self.paths) if self.paths and move.parent != -1 else None
            self.paths.append((*(() if parent is None else self.paths[parent]), len(self.paths)))
            self.ends.append(0 if parent is None else self.ends[parent])
            self.tokens.append(None)
            self.last_run, self.window_runs = None, ()
        return len(self.paths) - 1, self.ends[-1]

    def draw(self, spec, length):
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        q, k, v = (torch.randn(n, length, DIM, generator=self.generator) for n in heads)
        return q.transpose(0, 1), k, (v if spec.latent_dim is None else k)[..., : spec.value_dim]

    def work(self, turn, move, segment, start, end):
        path, ids = self.paths[segment], tuple(range(start, end))
        self.window_runs = self.placer.advance_windows(
            self.window_runs, start, end, self.reservation, is_chunk=move.is_chunk
        )
        if move.is_chunk:
            runs = self.placer.place_chunk(start, end, turn, self.reservation)
            self.last_run = runs[-1]
            return Prefill(path, start, ids, runs, window_runs=self.window_runs)
        runs = self.placer.grow(self.last_run, start, end - start, self.reservation)
        self.last_run = runs[-1]
        return Decode((Row(0, path, start, ids, runs, 0, window_runs=self.window_runs),))

    def expected(self, segment, start, layer, q_THD):
        """Out [T, H, V] of the rows from `start` on."""
        k, v = (
            torch.cat(resident, dim=1).transpose(0, 1)
            for resident in zip(*(self.tokens[i][layer] for i in self.paths[segment]), strict=True)
        )
        mask = visible(range(start, start + len(q_THD)), range(len(k)), self.case.reaches[layer])
        return reference.attend(q_THD, k, v, mask, SCALE, sink_H=SINK_H).out_THD


MOVES = st.builds(
    Move, st.booleans(), st.one_of(st.integers(1, 6), st.integers(1, 50)), st.sampled_from([None, None, -1, 0, 1, 2])
)
CASES = st.builds(
    Case,
    world_size=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    reaches=st.lists(reaches(most=24), min_size=1, max_size=3).map(tuple),
    moves=st.lists(MOVES, min_size=1, max_size=6).map(tuple),
    latent_dim=st.sampled_from([None, None, None, 5]),
    own_value_dim=st.sampled_from([None, None, 5]),
).filter(lambda case: case.windowed)


@settings(max_examples=150, deadline=None)
@given(CASES)
def test_chunks_and_rows_see_what_a_dense_mask_shows(case):
    for _, found, expected, _ in Story(case).follow():
        torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=5e-6)


@settings(max_examples=40, deadline=None)
@given(CASES.filter(lambda case: case.latent_dim is None and case.own_value_dim is None))
def test_keys_in_8_bits_stay_close_while_blocks_roll(case):
    for _, found, expected, _ in Story(case, QuantizedPool).follow():
        torch.testing.assert_close(found.double(), expected, atol=0.15, rtol=0)


def test_rows_exchange_nothing_in_windowed_layers():
    case = Case(
        3,
        0,
        (AttentionSpan(10), AttentionSpan(), AttentionSpan(section=10)),
        (Move(True, 30, -1), *[Move(False, 3, None)] * 4),
    )
    sent = [set(), set(), set()]
    for layer, found, _, num_bytes in list(Story(case).follow()):
        if len(found) == 3:
            sent[layer].add(num_bytes)
    assert sent[0] == sent[2] == {0}
    assert 0 not in sent[1]


@pytest.mark.parametrize("length", [61, 400])
@pytest.mark.parametrize("reach", [AttentionSpan(10), AttentionSpan(section=10)])
def test_a_rank_sends_no_more_of_a_chunk_than_a_window(reach, length):
    """The keys that the next piece, or the next chunk, sees of this piece: 9 tokens at most, to 2 others."""
    case = Case(3, 0, (reach, reach), (Move(True, length, -1),))
    sent = {num_bytes for _, _, _, num_bytes in Story(case).follow()}
    assert len(sent) == 1
    assert 0 < max(sent) <= 9 * 2 * (2 * 2 * DIM * 4)
