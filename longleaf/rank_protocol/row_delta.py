"""Delta encoding of rows: a plan contains the constant fields of a sequence once. Later rows contain only changes."""

from collections.abc import Sequence

from msgspec.structs import replace

from longleaf.rank_protocol.step import Decode, Row, StepPlan
from longleaf.runs import Run, until


class RowState:
    """For each sequence that is not released, the fields with which a rank completes later rows."""

    def __init__(self, block_size: int) -> None:
        """`block_size`: that of window runs."""
        self._block_size = block_size
        self._sent: dict[int, Row] = {}
        """By sequence, a row with the fields that later rows omit."""

    def complete(self, plan: StepPlan) -> StepPlan:
        """The plan with complete rows, except the sampling terms. Plans must be passed in order of execution. Raises
        ValueError for a row that continues an unknown sequence."""
        for sequence in plan.release_sequences:
            self._sent.pop(sequence, None)
        if not isinstance(plan.work, Decode):
            return plan
        rows = [self._begin(row) if row.path else self._resume(row) for row in plan.work.rows]
        return replace(plan, work=Decode(tuple(rows)))

    def cut_back(self, sequence: int, end: int) -> None:
        """Truncates the last row of a sequence at `end`, after the drafts beyond it were rejected."""
        sent_row = self._sent[sequence]
        window_runs = tuple(until(run, end, self._block_size) for run in sent_row.window_runs)
        self._sent[sequence] = replace(sent_row, window_runs=window_runs)

    def _begin(self, row: Row) -> Row:
        # Token ids and terms may be large, and are sent only once.
        self._sent[row.sequence] = replace(row, token_ids=(), terms=None)
        return row

    def _resume(self, row: Row) -> Row:
        sent_row = self._sent.get(row.sequence)
        if sent_row is None:
            raise ValueError(f"a row continues unknown sequence {row.sequence}")
        if not row.window_runs:
            return replace(row, path=sent_row.path, rope=sent_row.rope, spans=sent_row.spans, hidden=sent_row.hidden)
        window_runs = _grown(sent_row.window_runs, row.window_runs, self._block_size)
        row = replace(row, path=sent_row.path, rope=sent_row.rope, spans=sent_row.spans, hidden=sent_row.hidden)
        self._sent[row.sequence] = row = replace(row, window_runs=window_runs)
        return row


def row_delta(known: Sequence[Run], runs: Sequence[Run], block_size: int) -> tuple[Run, ...]:
    """Encodes the single run of a window relative to its known state. The run has grown at the end, and may have lost
    blocks at the start. The result contains only its new blocks."""
    [last], [run] = known, runs
    num_retained = len(last.blocks) - (run.start - last.start) // block_size if run.start < last.end else 0
    return (Run(run.rank, run.start, run.end, run.blocks[num_retained:]),)


def _grown(known: Sequence[Run], growth: Sequence[Run], block_size: int) -> tuple[Run, ...]:
    """Decodes `growth`, a result of `row_delta`."""
    [last], [run] = known, growth
    retained = last.blocks[(run.start - last.start) // block_size :] if run.start < last.end else ()
    return (Run(run.rank, run.start, run.end, retained + run.blocks),)
