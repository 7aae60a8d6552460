"""The host's work around kernels on a GPU: it does not wait, and a graph of its launches serves other work."""

import torch

from longleaf.attention import block_attribution
from longleaf.attention.block_attribution import NO_EDGE, AttributionColumns
from longleaf.attention.masks import Read, Reads
from longleaf.attention.partial import Partial
from longleaf.kernels import int8
from tests.gpu.attention import CAP, attributed_reads
from tests.gpu.place import TOLERANCES, Place, assert_close, scale_of, wanted

KEY_HEADS, GROUP, DIM, BLOCK_SIZE = 8, 4, 128, 128
BFLOAT16 = TOLERANCES[torch.bfloat16]


def no_call_waits(place: Place) -> None:
    """Neither the first call of a step, which brings its table, nor those of later layers."""
    place.needs_gpu()
    num_slots = place.num_keys // BLOCK_SIZE * BLOCK_SIZE
    q = place.drawn(0, 8, KEY_HEADS * GROUP, DIM, dtype=torch.bfloat16)
    k, v = (place.drawn(i, KEY_HEADS, num_slots, DIM, dtype=torch.bfloat16) for i in (1, 2))
    retained = int8.empty(KEY_HEADS, num_slots // BLOCK_SIZE, BLOCK_SIZE, DIM, place.device)
    slots, kernels, scale = torch.arange(num_slots, device=place.device), place.kernels, scale_of(q)

    def step() -> None:
        reads = attributed_reads([Read(0, 8, 0, num_slots - 8), Read(3, 4, num_slots - 8, num_slots)])
        kernels.store((k, v), slots[:8], (k[:, -8:], v[:, -8:]))
        kernels.store_int8(retained, slots, k, v)
        for softcap in (None, CAP):
            partial = kernels.attend(q, k, v, reads, scale, softcap)
            kernels.attend_int8(q, retained, reads, scale, softcap)
            add_shares(place, reads, partial)
        kernels.fold(torch.stack([kernels.pack(partial, torch.bfloat16)] * 4))

    step()  # compiles
    with place.without_synchronization():
        step()


def add_shares(place: Place, reads: Reads, partial: Partial) -> None:
    """Adds the first row's attribution of the last layer to two columns."""
    assert reads.attributed is not None
    reported_KE2, num_entries = reads.attributed.take(), reads.attributed.reads[0].num_entries
    assert reported_KE2 is not None
    bounds = ((0, num_entries - 1, 0), (num_entries - 1, num_entries, 1))
    runs = [(0, 0, num_entries, *bound, 0, NO_EDGE) for bound in bounds]
    columns = AttributionColumns(block_attribution.table(runs, 8), block_attribution.table([(0, 1, 0, 2)], 4))
    means, largest = torch.zeros(2, 1, 3, device=place.device)
    found = (means, largest, torch.zeros(1, 3, dtype=torch.int32, device=place.device))
    place.kernels.add_shares(reported_KE2, partial.lse_TH, None, columns, found, sink_column=2, first_head=0)


def a_graph_serves_any_mix(place: Place) -> None:
    """Attention is captured with the table of one step, and replayed with those of others in its place."""
    place.needs_gpu()
    rows, keys, half = 4, place.num_keys, place.num_keys // 2
    q = place.drawn(0, rows, KEY_HEADS * GROUP, DIM, dtype=torch.bfloat16)
    k, v = (place.drawn(i, KEY_HEADS, keys, DIM, dtype=torch.bfloat16) for i in (1, 2))
    mixes = [
        [Read(0, rows, 0, keys)],
        [Read(0, rows, 0, half), *(Read(i, i + 1, half + 50 * i, half + 50 * i + 41) for i in range(rows))],
        [Read(1, 3, 5, keys // 3)],
    ]
    made = [Reads(reads) for reads in mixes]
    eager = [place.kernels.attend(q, k, v, reads, scale_of(q)) for reads in made]
    torch.cuda.synchronize(place.device)
    (captured,), *others = ([*reads.cache.values()] for reads in made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = place.kernels.attend(q, k, v, made[0], scale_of(q))
    first = captured.table.clone()
    tables = [first, *(other.table for (other,) in others)]
    for reads, table, alone in zip(mixes, tables, eager, strict=True):
        assert len(table) <= len(captured.table), "the table of the capture must hold the others"
        captured.table.zero_()
        captured.table[: len(table)] = table
        graph.replay()
        torch.cuda.synchronize(place.device)
        assert_close(found, wanted(q, k, v, reads), BFLOAT16)
        assert_close(found, alone, 1e-6)
