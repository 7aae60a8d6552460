"""However runs lie, their pieces hold each position once, on one rank each, in whole blocks, and none is too large."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from coordinator.persistence.snapshots.chunking import MIN_PIECE_BYTES, NUM_PIECES, cut_pieces, piece_blocks
from longleaf.positions import OWN_ROPE
from longleaf.rank_protocol.snapshots import MAX_PIECE_BYTES
from longleaf.runs import Run, ceil_div
from longleaf.storage.manifest import PieceRef, SegmentManifest
from longleaf.storage.names import Attempt


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[Run], int]:
    """Runs of a segment, all but the last of whole blocks, and the size of a block."""
    size, start = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    runs, free = list[Run](), [0, 0, 0]
    for rank, count in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=12)):
        blocks = tuple(range(free[rank], free[rank] + count))
        free[rank] += count
        runs.append(Run(rank, start, start + count * size, blocks))
        start += count * size
    last = runs[-1]
    runs[-1] = Run(last.rank, last.start, last.end - draw(st.integers(0, size - 1)), last.blocks)
    return runs, size


@given(segments(), st.sampled_from([1, MIN_PIECE_BYTES // 3, MAX_PIECE_BYTES // 2, MAX_PIECE_BYTES * 2]))
def test_pieces_hold_each_position_once(found: tuple[list[Run], int], block_bytes: int) -> None:
    runs, size = found
    pieces = cut_pieces(runs, size, block_bytes)
    start, end = runs[0].start, runs[-1].end
    attempt = Attempt("service", "service-1", "a")
    reported = [
        PieceRef(name=attempt.piece(i), runs=tuple((r.start, r.end) for r in piece), num_bytes=1, digest="")
        for i, piece in enumerate(pieces)
    ]
    SegmentManifest(
        service="service",
        fingerprint="",
        form="",
        segment="service-1",
        parent="service-0" if start else None,
        start=start,
        num_tokens=end - start,
        rope=OWN_ROPE,
        pieces=tuple(reported),
        windows=None,
        token_ids=array("I", range(end - start)).tobytes(),
    ).check()
    for piece in pieces:
        assert len({run.rank for run in piece}) == 1
        num_blocks = sum(len(run.blocks) for run in piece)
        assert num_blocks == 1 or num_blocks * block_bytes <= MAX_PIECE_BYTES
        for run in piece:
            assert len(run.blocks) == ceil_div(len(run), size)
            whole = next(one for one in runs if one.rank == run.rank and one.start <= run.start < one.end)
            first = (run.start - whole.start) // size
            assert (run.start - whole.start) % size == 0
            assert whole.blocks[first : first + len(run.blocks)] == run.blocks


@given(st.integers(1, 1 << 22), st.integers(1, 1 << 16))
def test_large_segments_have_many_pieces_and_small_ones_few(num_blocks: int, block_bytes: int) -> None:
    most = piece_blocks(num_blocks, block_bytes)
    total = num_blocks * block_bytes
    assert most == 1 or most * block_bytes <= MAX_PIECE_BYTES
    if total >= 2 * NUM_PIECES * MIN_PIECE_BYTES:
        assert ceil_div(num_blocks, most) >= NUM_PIECES
    if total <= MIN_PIECE_BYTES:
        assert most >= num_blocks
