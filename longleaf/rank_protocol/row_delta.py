"""What plans tell of a sequence once, and ranks remember: later rows tell only what grew."""

from collections.abc import Sequence

from msgspec.structs import replace

from longleaf.rank_protocol.step import Decode, Row, StepPlan
from longleaf.runs import Run, until


class RowState:
    """What a rank was told of each sequence, until that is released: as much as makes its rows whole again."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._told: dict[int, Row] = {}
        """By sequence, a row of it with what later ones leave out."""

    def complete(self, plan: StepPlan) -> StepPlan:
        """The plan as if each of its rows told everything, but for the terms. Plans must come in the order in which
        they are executed. Raises ValueError for a row that goes on with a sequence of which nothing was told."""
        for sequence in plan.release_sequences:
            self._told.pop(sequence, None)
        if not isinstance(plan.work, Decode):
            return plan
        rows = [self._begin(row) if row.path else self._go_on(row) for row in plan.work.rows]
        return replace(plan, work=Decode(tuple(rows)))

    def cut_back(self, sequence: int, end: int) -> None:
        """The last row of a sequence ends there: drafts behind it were refused."""
        reported = self._told[sequence]
        window_runs = tuple(until(run, end, self._block_size) for run in reported.window_runs)
        self._told[sequence] = replace(reported, window_runs=window_runs)

    def _begin(self, row: Row) -> Row:
        self._told[row.sequence] = replace(row, token_ids=(), terms=None)  # which may be many, and are told once
        return row

    def _go_on(self, row: Row) -> Row:
        reported = self._told.get(row.sequence)
        if reported is None:
            raise ValueError(f"a row goes on with sequence {row.sequence}, of which nothing was told")
        if not row.window_runs:
            return replace(row, path=reported.path, rope=reported.rope, spans=reported.spans, hidden=reported.hidden)
        window_runs = _grown(reported.window_runs, row.window_runs, self._block_size)
        row = replace(row, path=reported.path, rope=reported.rope, spans=reported.spans, hidden=reported.hidden)
        self._told[row.sequence] = row = replace(row, window_runs=window_runs)
        return row


def growth(known: Sequence[Run], runs: Sequence[Run], block_size: int) -> tuple[Run, ...]:
    """What to tell of the one run of a window to whoever knows it as it was, before it grew behind and perhaps lost
    blocks in front: of its blocks only the new ones."""
    [last], [run] = known, runs
    num_retained = len(last.blocks) - (run.start - last.start) // block_size if run.start < last.end else 0
    return (Run(run.rank, run.start, run.end, run.blocks[num_retained:]),)


def _grown(known: Sequence[Run], growth: Sequence[Run], block_size: int) -> tuple[Run, ...]:
    """The run of which `growth` was told."""
    [last], [run] = known, growth
    retained = last.blocks[(run.start - last.start) // block_size :] if run.start < last.end else ()
    return (Run(run.rank, run.start, run.end, retained + run.blocks),)
