"""Serialization of KV blocks: bit-identical in every kind of pool, zeros past the end, and damage is detected."""

import json
import math
import tracemalloc

import pytest
import safetensors.torch
import torch

from longleaf.errors import DataLoss
from longleaf.positions import EVERY_RANK
from longleaf.runs import Run
from tests.support.fakes.kv_store import FolderStore
from tests.support.pools import BLOCK, NUM_BLOCKS, POOLS, filled
from workers.kv_io import kv_piece as pieces
from workers.kv_io.kv_piece import HostCopy, KvPiece, form_of
from workers.runners.kv_transfer import Content

WINDOWED = {"windows apart", "int8 windows apart", "windows alone"}
KINDS = [(name, False) for name in POOLS if name != "windows alone"] + [(name, True) for name in sorted(WINDOWED)]
RUNS = (Run(0, 4, 13, (5, 2, 6)), Run(0, 16, 20, (0, 3)))
"""The second one ends in the middle of its last block."""


RANGES = tuple((run.start, run.end) for run in RUNS)


def written(pool, runs=RUNS, of_windows=False):
    return b"".join(HostCopy(pool, runs, of_windows=of_windows).parts())


def read(data, pool, ranges=RANGES, of_windows=False):
    return KvPiece("p", data, pool, ranges, of_windows=of_windows)


@pytest.mark.parametrize(("name", "of_windows"), KINDS)
def test_round_trip_is_bit_identical(name, of_windows):
    source, target = filled(POOLS[name], 1), filled(POOLS[name], 2)
    rank = EVERY_RANK if of_windows else 0
    runs = [Run(rank, run.start, run.end, run.blocks) for run in RUNS]
    piece = read(written(source, runs, of_windows), target, of_windows=of_windows)
    assert piece.of_windows == of_windows
    before = {there: Content(target, of_windows=there).export(range(7)) for there in (False, True)}
    bits = Content(source, of_windows=of_windows).export(range(7))
    elsewhere = [Run(3, 16, 20, (4, 1)), Run(3, 7, 13, (6, 0))]
    numbers = piece.find(elsewhere)
    assert numbers == [3, 4, 1, 2]
    piece.restore(target, numbers, [4, 1, 6, 0])
    wanted = before[of_windows].clone()
    wanted[[4, 6, 0]] = bits[[0, 2, 6]]
    after = Content(target, of_windows=of_windows).export(range(7))
    last = 1  # only one of its slots was in use
    for block in set(range(7)) - {last}:
        assert torch.equal(after[block], wanted[block])
    for part in (part for part in target.blocks(of_windows=of_windows) if part.has_slots):
        assert not part.tensor[:, last, 1:].any()
    for now, then in zip(target.blocks(of_windows=of_windows), source.blocks(of_windows=of_windows), strict=True):
        first = slice(0, 1) if now.has_slots else slice(None)
        assert torch.equal(now.tensor[:, last, first], then.tensor[:, 3, first])
    other = not of_windows
    assert torch.equal(Content(target, of_windows=other).export(range(7)), before[other])


@pytest.mark.parametrize("name", ["plain", "half", "latents", "narrow values", "int8"])
def test_equal_keys_give_equal_bytes_in_any_slot(name):
    """Other content of their block does not matter."""
    here, there = filled(POOLS[name], 1), filled(POOLS[name], 2)
    bits = Content(here).export([5, 2, 6, 0, 3])
    Content(there).restore([9, 1, 0, 7, 4], bits)
    for part in (part for part in there.blocks(of_windows=False) if part.has_slots):
        part.tensor[:, 4, 1:] = 3
    runs = (Run(2, 4, 13, (9, 1, 0)), Run(2, 16, 20, (7, 4)))
    assert written(here) == written(there, runs)
    for part in (part for part in here.blocks(of_windows=False) if part.has_slots):
        part.tensor[:, 3, :1] = 3
    assert written(here) != written(there, runs)


def test_piece_is_a_valid_safetensors_file():
    pool = filled(POOLS["int8"], 1)
    tensors = safetensors.torch.load(written(pool))
    names = [f"{layer}.{part}" for layer in (0, 1) for part in ("keys", "values", "exponents", "scales")]
    assert sorted(tensors) == sorted(names)
    exponents = pool.blocks(of_windows=False)[2].tensor
    assert torch.equal(tensors["0.exponents"], exponents[:, [5, 2, 6, 0, 3]].transpose(0, 1))


def test_formats_distinguish_pools():
    forms = [form_of(make(), of_windows=False) for name, make in POOLS.items() if name != "windows alone"]
    assert len(set(forms)) == len(forms)
    assert form_of(POOLS["plain"](), of_windows=False) == (
        "blocks of 3; 0.keys F32 2x3x8; 0.values F32 2x3x8; 1.keys F32 3x3x5; 1.values F32 3x3x5"
    )
    assert form_of(POOLS["plain"](), of_windows=True) == form_of(POOLS["windows alone"](), of_windows=False) == ""


@pytest.mark.parametrize("other", ["half", "latents", "int8", "windows apart"])
def test_piece_of_another_format_is_refused(other):
    with pytest.raises(DataLoss, match="a pool with another layout"):
        read(written(filled(POOLS["plain"], 1)), POOLS[other]())


def test_window_pieces_and_other_pieces_are_not_interchangeable():
    pool = filled(POOLS["windows apart"], 1)
    for of_windows in (False, True):
        with pytest.raises(DataLoss, match="a pool with another layout"):
            read(written(pool, of_windows=of_windows), pool, of_windows=not of_windows)
    with pytest.raises(DataLoss, match="a pool with another layout"):
        read(written(filled(POOLS["plain"], 1)), POOLS["plain"](), of_windows=True)


def test_positions_outside_whole_blocks_are_not_found():
    piece = read(written(filled(POOLS["plain"], 1)), POOLS["plain"]())
    for start, end in [(1, 4), (4, 6), (5, 8), (4, 16), (16, 21), (16, 22), (13, 16), (19, 22)]:
        assert piece.find([Run(0, start, end, ())]) is None
    assert piece.find([Run(0, 4, 7, ()), Run(0, 19, 20, ())]) == [0, 4]


def test_truncated_piece_is_refused():
    pool = filled(POOLS["plain"], 1)
    data = written(pool)
    header = int.from_bytes(data[:8], "little")
    for end in [*range(0, 8 + header + 9, 7), len(data) // 2, len(data) - 1]:
        with pytest.raises(DataLoss):
            read(data[:end], pool)
    with pytest.raises(DataLoss):
        read(data + b"x", pool)


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [
        (b'"version":"1"', b'"version":"2"', "version is 2"),
        (b'"positions":"4-13', b'"positions":"4-17', "its positions"),
        (b'"positions":"4-13', b'"positions":"4+13', "its positions"),
        (b"__metadata__", b"__metadate__", "not a piece"),
    ],
)
def test_wrong_header_is_refused(old, new, reported):
    pool = filled(POOLS["plain"], 1)
    data = written(pool)
    assert old in data
    with pytest.raises(DataLoss, match=reported):
        read(data.replace(old, new), pool)


@pytest.mark.parametrize("ranges", [((4, 13),), ((4, 13), (16, 21)), ((4, 13), (17, 20)), ((16, 20), (4, 13)), ()])
def test_positions_that_differ_from_the_manifest_are_refused(ranges):
    pool = filled(POOLS["plain"], 1)
    with pytest.raises(DataLoss, match="its positions differ from those in its manifest"):
        read(written(pool), pool, ranges)


def forged(pool, changes, positions="4-13 16-20", size=None):
    """A piece with as many bytes as its blocks have, whose header states something else."""
    parts, end = dict[str, dict[str, object]](), 0
    for name, tensor, _ in pool.blocks(of_windows=False):
        shape = [5, len(tensor), *tensor.shape[2:]]
        start, end = end, end + math.prod(shape) * tensor.itemsize
        parts[name] = {"dtype": pieces.DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    changes(parts)
    metadata = {"version": "1", "form": form_of(pool, of_windows=False), "positions": positions}
    text = json.dumps({"__metadata__": metadata, **parts}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end if size is None else size)


def test_genuine_piece_is_accepted():
    pool = filled(POOLS["plain"], 1)
    assert read(forged(pool, lambda parts: None), pool).find(RUNS) == [0, 1, 2, 3, 4]


FORGERIES = {
    "no tensor": lambda parts: parts.clear(),
    "one is missing": lambda parts: parts.pop("0.keys"),
    "one more": lambda parts: parts.update(more={"dtype": "F32", "shape": [5, 0], "data_offsets": [0, 0]}),
    "another name": lambda parts: parts.update(other=parts.pop("1.values")),
    "empty tensors": lambda parts: [part.update(shape=[5, 0], data_offsets=[0, 0]) for part in parts.values()],
    "another dtype": lambda parts: parts["0.keys"].update(dtype="I8"),
    "no dtype": lambda parts: parts["0.keys"].update(dtype="X"),
    "another shape of as many numbers": lambda parts: parts["0.keys"].update(shape=[5, 3, 2, 8]),
    "more dimensions": lambda parts: parts["0.keys"].update(shape=[5, 2, 3, 8, 1]),
    "negative numbers": lambda parts: parts["0.keys"].update(shape=[-5, -2, 3, 8]),
    "huge numbers": lambda parts: parts["0.keys"].update(shape=[2**62, 2**62, 4]),
    "twice the same bytes": lambda parts: parts["0.values"].update(data_offsets=parts["0.keys"]["data_offsets"]),
    "bytes that are not there": lambda parts: parts["0.keys"].update(data_offsets=[1 << 40, (1 << 40) + 960]),
    "the other way round": lambda parts: parts["0.keys"].update(data_offsets=[960, 0]),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_tensors_that_differ_from_the_pool_are_refused_on_read(forge):
    pool = filled(POOLS["plain"], 1)
    with pytest.raises(DataLoss, match="its tensor"):
        read(forged(pool, forge), pool)


@pytest.mark.parametrize("num_blocks", [4_000_000, 1 << 40])
def test_empty_blocks_are_refused_before_they_are_listed(num_blocks):
    """Two kilobytes can declare a large number of blocks of empty tensors."""
    pool = filled(POOLS["plain"], 1)

    def empty(parts):
        for part in parts.values():
            part.update(shape=[num_blocks, 0], data_offsets=[0, 0])

    ranges = ((0, num_blocks * BLOCK),)
    data = forged(pool, empty, f"0-{num_blocks * BLOCK}", size=0)
    tracemalloc.start()
    try:
        with pytest.raises(DataLoss, match="its tensors have 0 bytes"):
            read(data, pool, ranges)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_oversized_header_is_not_parsed():
    pool = filled(POOLS["plain"], 1)
    data = forged(pool, lambda parts: parts.update({f"{i}": parts["0.keys"] for i in range(500)}))
    with pytest.raises(DataLoss, match="its header has"):
        read(data, pool)


def test_any_flipped_byte_is_detected(tmp_path):
    store, pool = FolderStore(str(tmp_path)), filled(POOLS["half"], 1)
    written = store.put("p", HostCopy(pool, RUNS, of_windows=False).parts())
    path, generator = tmp_path / "p", torch.Generator().manual_seed(1)
    data = path.read_bytes()
    assert store.get("p", written.digest) == data
    for at in torch.randint(0, len(data), (20,), generator=generator).tolist():
        path.write_bytes(data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :])
        with pytest.raises(DataLoss):
            store.get("p", written.digest)


def test_oversized_piece_is_refused(monkeypatch):
    pool = filled(POOLS["plain"], 1)
    size = math.prod(Content(pool).export(range(5)).shape)
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", size)
    assert len(written(pool)) > size
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", size - 1)
    with pytest.raises(ValueError, match="more than a piece may have"):
        HostCopy(pool, RUNS, of_windows=False)
    HostCopy(pool, [Run(0, 0, 3, (NUM_BLOCKS - 1,))], of_windows=False)


def test_copy_is_independent_of_its_pool():
    pool = filled(POOLS["plain"], 1)
    copy, before = HostCopy(pool, RUNS, of_windows=False), written(pool)
    for part in pool.blocks(of_windows=False):
        part.tensor.zero_()
    assert b"".join(copy.parts()) == before
