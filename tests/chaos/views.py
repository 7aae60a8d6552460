"""The state of an idle service, and checks of that state."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.group_messages import SegmentLayout
from tests.chaos.points import ask
from workers.kv_cache.block_table import BlockTable

KEY_TOLERANCE = 2e-5
"""Largest difference of a stored number, relative to the largest one of its layer."""
RankTable = dict[int, tuple[int, dict[int, list[tuple[int, int, int]]]]]
"""By segment: its start, and the stored extents by rank."""
Keys = dict[int, np.ndarray]
"""Stored keys of each token, [S, N, K, D], by layer."""


class Look(NamedTuple):
    """State of the idle coordinator, after its invariants were checked."""

    layout: tuple[SegmentLayout, ...]
    forgotten: frozenset[int]
    """Segments that the next plan removes from the ranks."""
    paths: dict[str, tuple[tuple[int, int, int], ...]]
    """Segments of each context and the range of positions used of each."""
    snapshots: dict[int, str]
    """Manifest name of each segment on storage."""


def slots(extents_by_rank: dict[int, list[tuple[int, int, int]]]) -> dict[int, dict[int, int]]:
    return {
        rank: {position: slot + position - start for start, end, slot in extents for position in range(start, end)}
        for rank, extents in extents_by_rank.items()
        if extents
    }


def check_block_tables(folder: Path, look: Look, pids: list[int], block_size: int) -> None:
    """The block table of every rank equals that of the coordinator."""
    for rank, pid in enumerate(pids):
        check_block_table(rank, ask(folder, pid, "book"), look, block_size)


def check_block_table(rank: int, found: RankTable, look: Look, block_size: int) -> None:
    """The block table of a rank equals that of the coordinator, except for segments with a pending removal."""
    wanted = BlockTable(0, block_size)
    wanted.replace(look.layout)
    missing = wanted._slots.keys() - found.keys()
    assert not missing, f"rank {rank} does not know of segments {sorted(missing)}"
    for segment, (start, resident) in found.items():
        if segment not in look.forgotten:
            assert segment in wanted._slots, f"rank {rank} knows of segment {segment}, but the coordinator does not"
            extents = {number: [tuple(e) for e in one.extents] for number, one in wanted._slots[segment].items()}
            found_slots, slots_wanted = slots(resident), slots(extents)
            windows = slots_wanted.pop(EVERY_RANK, {}).items()
            # windows that no later token sees are released without a message: ranks never read them
            are_there = windows <= found_slots.pop(EVERY_RANK, {}).items()
            is_same = (start, found_slots) == (wanted._starts[segment], slots_wanted)
            assert is_same and are_there, f"rank {rank} and the coordinator differ in segment {segment}"


def keys_of(folder: Path, look: Look, context: str, pids: list[int]) -> Keys:
    """The stored keys of a context, in token order."""
    layouts = {layout.segment: layout for layout in look.layout}
    pieces: list[tuple[int, int, int, Keys]] = []
    for segment, start, end in look.paths[context]:
        for run in layouts[segment].runs:
            if run.start < end and run.end > start:
                resident = ask(folder, pids[run.rank], "keys", [run])
                pieces.append((run.start, max(start, run.start), min(end, run.end), resident))
    ends = [0, *(end for _, _, end, _ in pieces)]
    assert [start for _, start, _, _ in pieces] == ends[:-1], f"{context}: stored runs are incomplete or out of order"
    layers = pieces[0][3]
    return {
        layer: np.concatenate([resident[layer][low - first : high - first] for first, low, high, resident in pieces])
        for layer in layers
    }


def check_keys(found: Keys, wanted: Keys, context: str) -> float:
    """Largest difference, relative to the largest number of its layer."""
    worst = 0.0
    for layer, expected in wanted.items():
        assert found[layer].shape == expected.shape, f"{context}, layer {layer}: {found[layer].shape}"
        share = float(np.abs(found[layer] - expected).max() / np.abs(expected).max())
        assert share <= KEY_TOLERANCE, f"{context}, layer {layer}: keys differ by {share:.1e} of the largest"
        worst = max(worst, share)
    return worst
