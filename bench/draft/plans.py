"""Plans of one sequence over keys that are never computed, with a chosen number of rows per step."""

from longleaf.rank_protocol.step import Decode, Row, SamplingTerms, StepPlan
from longleaf.runs import Run, ceil_div, cut_chunk
from longleaf.sampling import Sampling

EPOCH = 1
CONTEXT, ANSWER = 0, 1
"""Segments: the context, and the tokens that the sequence adds on rank 0."""
LAYOUT_ROW, SEQUENCE = 0, 1
FIRST_ID, NUM_IDS = 3, 200
"""Ids to give: none is special in the models that are measured."""


def num_blocks(num_keys: int, num_added: int, world_size: int, block_size: int) -> int:
    """Blocks that a rank needs for so many keys in all, and so many that are added."""
    return ceil_div(ceil_div(num_keys, block_size), world_size) + ceil_div(num_added, block_size)


class Plans:
    """Makes the plans, one after the other; every rank makes the same ones."""

    def __init__(self, num_keys: int, world_size: int, block_size: int) -> None:
        self._num_keys = num_keys
        self._block_size = block_size
        self._num_added = 0
        self._step = 0
        self._runs = tuple(
            Run(rank, low, high, tuple(range(ceil_div(high - low, block_size))))
            for rank, (low, high) in enumerate(cut_chunk(0, num_keys, block_size, world_size))
        )
        self._first_block = max(len(run.blocks) for run in self._runs)

    def layout_plan(self) -> StepPlan:
        """The first plan announces the layout of the context. It has one row with the last token of the context and
        samples nothing.
        """
        return self._plan(Row(LAYOUT_ROW, (CONTEXT,), self._num_keys - 1, (FIRST_ID,), self._runs, -1))

    def next(self, num_rows: int) -> StepPlan:
        """A step of so many tokens of the sequence, at the positions after those before."""
        is_first, start = self._num_added == 0, self._num_keys + self._num_added
        self._num_added += num_rows
        end = self._first_block + ceil_div(self._num_added, self._block_size)
        run = Run(0, self._num_keys, start + num_rows, tuple(range(self._first_block, end)))
        ids = tuple(FIRST_ID + position % NUM_IDS for position in range(start, start + num_rows))
        path, terms = ((CONTEXT, ANSWER), SamplingTerms(Sampling())) if is_first else ((), None)
        return self._plan(Row(SEQUENCE, path, start, ids, (run,), self._step - 1, terms))

    def _plan(self, row: Row) -> StepPlan:
        plan = StepPlan(EPOCH, self._step, Decode((row,)))
        self._step += 1
        return plan
