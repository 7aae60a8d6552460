"""Reads of any kind, and the keys that each row sees through them."""

import torch
from hypothesis import strategies as st

from longleaf.attention import Partial, reference
from longleaf.attention.masks import Read

MAX_KEYS = 70
"""Keys of a read."""


def seen_through(reads, num_rows: int, num_slots: int) -> torch.Tensor:
    """[T, S], true where a row sees the key in a slot; no two of the reads show it the same one."""
    seen_TS = torch.zeros(num_rows, num_slots, dtype=torch.bool)
    for read in reads:
        offset, window = read.mask
        row_Q1 = torch.arange(read.row_end - read.row_start)[:, None]
        distance_QS = offset + row_Q1 - torch.arange(read.slot_end - read.slot_start)
        rectangle = seen_TS[read.row_start : read.row_end, read.slot_start : read.slot_end]
        rectangle |= (distance_QS >= 0) & (distance_QS < window)
    return seen_TS


def expected(q_THD, k_KSD, v_KSV, reads, scale: float, softcap: float | None = None) -> Partial:
    """The partial in float64; rows that see no key may have any value."""
    seen_TS = seen_through(reads, len(q_THD), k_KSD.shape[1])
    k_SKD, v_SKV = (
        tensor.transpose(0, 1).masked_fill(~seen_TS.any(dim=0)[:, None, None], 0) for tensor in (k_KSD, v_KSV)
    )
    return reference.attend(q_THD, k_SKD, v_SKV, seen_TS, scale, softcap=softcap)


@st.composite
def rectangles(draw, num_rows: int, most: int = 5) -> list[Read]:
    """Reads of stretches that follow one another: plain, diagonal, banded, of no row, of no key."""
    reads, slot = [], draw(st.integers(0, 9))
    for _ in range(draw(st.integers(0, most))):
        first, last = sorted(draw(st.tuples(st.integers(0, num_rows), st.integers(0, num_rows))))
        num_keys = draw(st.integers(0, MAX_KEYS))
        offset = draw(st.one_of(st.none(), st.integers(-40, 90)))
        window = None if offset is None else draw(st.one_of(st.none(), st.integers(1, 60)))
        reads.append(Read(first, last, slot, slot + num_keys, offset, window))
        slot += num_keys + draw(st.integers(0, 3))
    return reads
