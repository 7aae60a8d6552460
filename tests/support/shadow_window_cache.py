"""The content of a rank's window pool, computed only from the plans."""

from hypothesis import strategies as st

from longleaf.positions import EVERY_RANK, STATE_SPAN, AttentionSpan, WindowSpec
from longleaf.rank_protocol.step import Decode, Prefill, Row, StepPlan
from longleaf.runs import Run, until

SIZES = st.integers(1, 10)
REACHES = st.lists(
    SIZES.map(AttentionSpan) | SIZES.map(lambda size: AttentionSpan(section=size)), min_size=1, max_size=4
).map(tuple)


def windows_of(least: int, most: int) -> st.SearchStrategy[WindowSpec]:
    """Windows and sections, at least one, or recurrent states, in a pool of `least` to `most` blocks."""
    sizes = st.integers(least, most)
    states = st.builds(WindowSpec, reaches=st.just((STATE_SPAN,)), num_blocks=sizes, is_state=st.just(True))
    return st.builds(WindowSpec, reaches=REACHES, num_blocks=sizes) | states


class ShadowWindowCache:
    """Records the token in each slot. Raises AssertionError if a token within a window is not in its slot."""

    def __init__(self, windows: WindowSpec, block_size: int) -> None:
        self._windows = windows
        self._block_size = windows.block_size(block_size)
        self._runs: dict[int, tuple[Run, ...]] = {}
        self._starts: dict[int, int] = {}
        self._slots: dict[int, tuple[int, int]] = {}
        """Segment and position, by slot."""

    def apply(self, plan: StepPlan) -> None:
        for segment in plan.release_segments:
            del self._runs[segment], self._starts[segment]
        work = plan.work
        works = list(work.rows) if isinstance(work, Decode) else [work] if isinstance(work, Prefill) else []
        for one in works:
            self._store(one)
        for one in works:
            self._read(one)

    def _store(self, work: Prefill | Row) -> None:
        segment, start = work.path[-1], work.start
        end = start + (work.num_tokens if isinstance(work, Row) else len(work.token_ids))
        self._starts.setdefault(segment, start)
        self._runs[segment] = work.window_runs
        self._check_runs(work.window_runs)
        is_last_only = isinstance(work, Prefill) or self._windows.is_state
        num_drafts = len(work.draft_ids) if isinstance(work, Row) else 0  # each draft has a state
        first = max(start, self._windows.first(end - num_drafts)) if is_last_only else start
        for position in range(first, end):
            self._slots[self._slot(segment, position)] = (segment, position)

    def cut_back(self, segment: int, end: int) -> None:
        """The drafts from `end` on were refused: their slots must not be read."""
        for position in range(end, self._runs[segment][-1].end):
            del self._slots[self._slot(segment, position)]
        self._runs[segment] = tuple(until(run, end, self._block_size) for run in self._runs[segment])

    def _read(self, work: Prefill | Row) -> None:
        self.check_place(work.path, work.start)

    def check_place(self, path: tuple[int, ...], end: int) -> None:
        """Checks that a token at `end` finds all tokens within its windows on a path."""
        for position in range(self._windows.first(end), end):
            segment = [s for s in path if self._starts[s] <= position][-1]
            assert self._slots[self._slot(segment, position)] == (segment, position)

    def _slot(self, segment: int, position: int) -> int:
        (run,) = (run for run in self._runs[segment] if run.start <= position < run.end)
        number, rest = divmod(position - run.start, self._block_size)
        assert 0 <= run.blocks[number] < self._windows.num_blocks
        return run.blocks[number] * self._block_size + rest

    def _check_runs(self, runs: tuple[Run, ...]) -> None:
        """In order, with no block too many, and each block in one."""
        blocks = [block for run in runs for block in run.blocks]
        assert len(blocks) == len(set(blocks))
        assert all(one.end < other.start for one, other in zip(runs, runs[1:], strict=False))
        for run in runs:
            assert run.rank == EVERY_RANK
            assert 0 < len(run) <= len(run.blocks) * self._block_size < len(run) + self._block_size
