"""Prefill of one chunk after a past that the ranks hold: gathered queries, gathered keys, and the choice by bytes.

Ranks are processes on this machine's CPUs, over gloo and in shared memory, with the parts of the real worker. The past
is distributed as the coordinator does it, with random keys: neither bytes nor speed depend on the values. Bytes and
collectives are counted on the tensors that a rank sends; over gloo data that all others read counts once for each of
them, as in the choice, and in shared memory, where it is written once, it counts once. A turn lasts as long as its
slowest rank. Usage:

    python -m bench.prefill --json
    python -m bench.prefill --world-size 2 --past 0 2000 --chunk 1000 --repeats 1
"""

import argparse
import json
import os
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
import torch.multiprocessing as mp

from bench.harness.arguments import log, unwind_on_terminate
from bench.harness.machine import describe
from bench.harness.subjects import RANDOM_LLAMA, subject
from coordinator.kv_cache.block_placer import BlockPlacer
from longleaf.comm import Groups
from longleaf.comm.process_group import ProcessGroups, TransportChoice, connect_store, open_store
from longleaf.config import PrefillName, apply_environment, network_environment, rank_environment
from longleaf.kernels import registry
from longleaf.merge import CountedMerge, PartialCodec, make_merge
from longleaf.network_interfaces import interface_of
from longleaf.rank_protocol.step import Prefill
from longleaf.runs import Run, ceil_div
from longleaf.topology import Topology
from tests.support.counting_comm import CountingComm
from workers.kv_cache.block_table import BlockTable
from workers.kv_cache.slots import FloatKvPool
from workers.model import model as models
from workers.step.forward import Peers, PrefillDone, PrefillStep
from workers.step.gathered_prefill import PastBuilder
from workers.step.inputs import InputBuilder
from workers.step.layers import Gathered

HOST = "127.0.0.1"
BLOCK_SIZE = 128
TIMEOUT = 600.0
"""Seconds that a collective may take."""
PAST, CHUNK = 0, 1
"""The two segments of the path."""

Row = dict[str, Any]
TransportName = Literal["gloo", "shared_memory"]


class Reader:
    """One rank that reads a chunk after a past, over and over."""

    def __init__(self, rank: int, model: models.Model, groups: Groups, past: int, chunk: int) -> None:
        self._model = model
        world_size = groups.world.world_size
        self._work, resident = plan(past, chunk, world_size)
        num_blocks = 1 + max(block for run in (*resident, *self._work.pieces) for block in run.blocks)
        self._pool = FloatKvPool(model.layers, num_blocks, BLOCK_SIZE, model.dtype, model.device)
        generator = torch.Generator().manual_seed(rank)
        for tensor in (*self._pool.keys.values(), *self._pool.values.values()):
            tensor.normal_(generator=generator)
        self._block_table = BlockTable(rank, BLOCK_SIZE)
        if resident:
            self._block_table.put(PAST, resident)
        self._backend = registry.choose("auto", model.device, model.dtype)
        self.comm = CountingComm(groups.world)
        wire = PartialCodec(self._backend)
        merge = make_merge("gather", Groups(groups.topology, self.comm, self.comm, None), wire)
        self._peers = Peers(model.device, self.comm, CountedMerge(merge, wire))

    def _inputs(self, way: PrefillName) -> InputBuilder:
        block_table, pool, layers, size = self._block_table, self._pool, self._model.layers, self.comm.world_size
        pasts = PastBuilder(block_table, pool, layers, world_size=size, way=way, wire=PartialCodec(self._backend))
        return InputBuilder(block_table, pool, layers, world_size=size, pasts=pasts)

    @torch.inference_mode()
    def read(self, way: PrefillName) -> int:
        """Reads the chunk; the number of layers that gathered keys."""
        self._block_table.release((CHUNK,))
        inputs = self._inputs(way).prefill(self._work)
        step = PrefillStep(inputs, self._pool, self._backend, self._peers, self._model.last_layer)
        ids, positions = inputs.token_ids_T[None], inputs.positions_T[None]
        with suppress(PrefillDone):
            self._model.decoder(input_ids=ids, position_ids=positions, use_cache=False, return_dict=False, step=step)
        return sum(isinstance(work, Gathered) for i, work in inputs.layers.items() if i != self._model.last_layer)


def plan(past: int, chunk: int, world_size: int) -> tuple[Prefill, list[Run]]:
    """The chunk's work, and the runs of the past, read in chunks of the same size."""
    placer = BlockPlacer([ceil_div(past, BLOCK_SIZE) + ceil_div(chunk, BLOCK_SIZE)] * world_size, BLOCK_SIZE)
    reservation = placer.reserve(placer.num_blocks)
    assert reservation is not None
    bounds = [*range(0, past, chunk), past, past + chunk]
    dealt = [
        placer.place_chunk(low, high, turn, reservation)
        for turn, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        if low < high
    ]
    ids = tuple(3 + i % 200 for i in range(chunk))
    path = (PAST, CHUNK) if past else (CHUNK,)
    return Prefill(path, past, ids, dealt[-1]), [run for runs in dealt[:-1] for run in runs]


def measure(rank: int, reader: Reader, groups: Groups, repeats: int) -> list[Row]:
    """One row per way, which take turns; the first turn is a warm-up."""
    seconds: dict[PrefillName, list[float]] = {way: [] for way in get_args(PrefillName)}
    rows: dict[PrefillName, Row] = {}
    for turn in range(repeats + 1):
        for way, times in seconds.items():
            comm, bytes_before, before = reader.comm, reader.comm.bytes_sent, reader.comm.num_operations
            groups.world.all_reduce(torch.zeros(1), "sum")  # all ranks begin together
            begin = time.perf_counter()
            num_layers = reader.read(way)
            taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            times.append(groups.world.all_reduce(taken, "max").item())
            sent, collectives = comm.bytes_sent - bytes_before, comm.num_operations - before
            rows[way] = {"layers_gathering_keys": num_layers, "bytes_sent_per_rank": sent, "collectives": collectives}
            if rank == 0:
                log(f"  {'warm-up' if turn == 0 else turn}, {way}: {times[-1]:.2f} s, {sent / 2**20:,.1f} MiB")
    for way, times in seconds.items():
        rows[way] |= {"seconds_median": round(median(times[1:]), 4), "seconds_min": round(min(times[1:]), 4)}
    return [{"way": way, **row} for way, row in rows.items()]


def live(rank: int, folder: str, port: int, options: argparse.Namespace, output: str) -> None:
    """The life of a rank: all measurements; rank 0 writes the rows."""
    torch.set_num_threads(1)
    topology = Topology(("here",) * options.world_size)
    model = models.load(folder, "auto", "cpu")
    store = connect_store(HOST, port)
    rows: list[Row] = []
    for epoch, transport in enumerate(options.transport, 1):
        owner = ProcessGroups(rank, topology, store, epoch=epoch, timeout=TIMEOUT, carrier=TransportChoice(transport))
        for chunk, past in product(options.chunk, options.past):
            if rank == 0:
                log(f"{options.world_size} ranks, {transport}, {chunk} tokens after {past}")
            found = measure(rank, Reader(rank, model, owner.groups, past, chunk), owner.groups, options.repeats)
            used = owner.groups.world.transport
            rows += [{"transport": used, "past_tokens": past, "chunk_tokens": chunk, **row} for row in found]
        owner.close()
    if rank == 0:
        Path(output).write_text(json.dumps(rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument("--world-size", type=int, default=4, help="ranks, at least 2")
    transports = get_args(TransportName)
    parser.add_argument("--transport", nargs="+", choices=transports, default=list(transports))
    parser.add_argument("--past", nargs="+", type=int, default=[0, 4096, 8192, 16384], metavar="TOKENS")
    parser.add_argument("--chunk", nargs="+", type=int, default=[1024, 4096], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of each way")
    options = parser.parse_args()
    if options.world_size < 2 or options.repeats < 1 or min(options.chunk) < 1 or min(options.past) < 0:
        parser.error("too few ranks, repeats or tokens to measure")
    return options


def main() -> None:
    unwind_on_terminate()
    options = parse()
    apply_environment(rank_environment(1) | network_environment(interface_of(HOST)))
    store = open_store(HOST)
    with subject(RANDOM_LLAMA) as measured, TemporaryDirectory() as folder:
        output = os.path.join(folder, "rows.json")
        arguments = (str(measured.folder), store.port, options, output)
        mp.spawn(live, arguments, nprocs=options.world_size, daemon=True)  # pyright: ignore[reportPrivateImportUsage]
        rows: list[Row] = json.loads(Path(output).read_text())
    head = {"bench": "prefill", "model": RANDOM_LLAMA, "world_size": options.world_size}
    rows = [{**head, **row, "repeats": options.repeats, "machine": describe()} for row in rows]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['transport']:13}  {row['chunk_tokens']:>6} tokens after {row['past_tokens']:>6}  {row['way']:7}"
            f"  {row['bytes_sent_per_rank'] / 2**20:>8.1f} MiB per rank  {row['seconds_median']:>8.3f} s"
        )


if __name__ == "__main__":
    main()
