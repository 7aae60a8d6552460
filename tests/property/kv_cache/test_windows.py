"""Rolling windows: tokens find their keys, little more is resident, and no reservation is exceeded."""

from bisect import bisect_left, bisect_right

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.kv_cache.block_placer import BlockCount, BlockPlacer, count_blocks
from coordinator.kv_cache.segment_placement import SegmentPlacement, SegmentPlacements
from coordinator.kv_cache.token_paths import Segment, TokenPath
from longleaf.positions import WindowSpec
from longleaf.runs import Run
from tests.support.shadow_window_cache import windows_of

WINDOWS = windows_of(100, 100)
STEPS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def positions(runs: tuple[Run, ...]) -> set[int]:
    return {position for run in runs for position in range(run.start, run.end)}


@settings(max_examples=1000)
@given(WINDOWS, st.integers(1, 5), st.integers(0, 20), STEPS, st.booleans())
def test_growth_keeps_what_is_seen_and_its_promise(
    windows: WindowSpec, block_size: int, start: int, steps: list[int], is_chunk: bool
) -> None:
    placer = BlockPlacer([200], block_size, windows)
    block_size = windows.block_size(block_size)
    count, first = sum(steps), start
    prefill, rows = (count, 0) if is_chunk else (0, count)
    reservation = placer.reserve(placer.blocks_needed(prefill, rows, num_at_once=max(steps)))
    assert reservation is not None
    num_reserved_windows, runs = reservation.left.windows, tuple[Run, ...]()
    for step in steps:
        end = start + step
        seen = set(range(max(first, windows.first(start)), start))
        runs = placer.advance_windows(runs, start, end, reservation, is_chunk=is_chunk)
        fresh = range(max(start, windows.first(end)) if is_chunk or windows.is_state else start, end)
        assert positions(runs) >= seen | set(fresh)
        assert all(min(run.start + block_size, run.end) > windows.first(start) for run in runs)
        assert sum(map(len, runs)) == len(positions(runs))
        assert reservation.left.windows + count_blocks(runs) == num_reserved_windows
        placer.audit(runs)
        start = end
    runs = placer.window_pool.trim(runs, start)
    assert positions(runs) >= set(range(max(first, windows.first(start)), start))
    assert count_blocks(runs) <= -(-(windows.span - 1) // block_size) + 1
    placer.release(reservation)
    assert placer.num_free == placer.num_blocks - BlockCount(windows=count_blocks(runs))
    placer.audit(runs)


@st.composite
def paths(draw: st.DrawFn, windows: WindowSpec) -> tuple[TokenPath, SegmentPlacements]:
    """A path that branches off its segments wherever they can be continued, and their placements."""
    placer = BlockPlacer([100], draw(st.integers(1, 5)), windows)
    reservation = placer.reserve(placer.num_blocks)
    assert reservation is not None
    path, placements = TokenPath(), SegmentPlacements(windows)
    for number in range(draw(st.integers(1, 4))):
        segment = Segment(number, path)
        placements.add(placement := SegmentPlacement(segment))
        for step in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
            start, end = segment.end, segment.end + step
            runs = placer.advance_windows(placement.window_runs, start, end, reservation, is_chunk=draw(st.booleans()))
            placement.window_runs = runs
            placement.extend(range(step), [Run(0, start, end, ())])
        placement.window_runs = placer.window_pool.trim(placement.window_runs, segment.end)
        path = segment.path
        end = placements.seams(path, draw(st.integers(0, path.end)))[1]
        path = path.cut(end)
    return path, placements


@settings(max_examples=300)
@given(WINDOWS, st.data())
def test_continuation_points_have_all_visible_keys(windows: WindowSpec, data: st.DataObject) -> None:
    path, placements = data.draw(paths(windows))
    placements.audit(path)
    resident = {p for segment, _, end in path.parts() for p in positions(placements[segment].window_runs) if p < end}
    seams = [p for p in range(path.end + 1) if resident >= set(range(windows.first(p), p))]
    for position in range(path.end + 1):
        below, above = placements.seams(path, position)
        assert below == seams[bisect_right(seams, position) - 1]
        assert above == seams[bisect_left(seams, position)]
    assert SegmentPlacements().seams(path, path.end // 2) == (path.end // 2, path.end // 2)
