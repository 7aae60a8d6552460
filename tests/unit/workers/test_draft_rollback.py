"""Rows that cannot have drafts are refused when a step is built."""

import pytest
from msgspec.structs import replace

from longleaf.rank_protocol.step import Row
from longleaf.runs import Run
from workers.step.inputs import check_drafts

ROW = Row(3, (0,), 8, (), (Run(0, 0, 11, (0,)),), 1, draft_ids=(5, 6))


@pytest.mark.parametrize("change", [{"token_index": -1}, {"num_scored": 1}])
def test_rows_with_scores_or_without_samples_cannot_have_drafts(change):
    check_drafts(ROW)
    check_drafts(replace(ROW, **change, draft_ids=()))
    with pytest.raises(ValueError, match="sequence 3 has drafts"):
        check_drafts(replace(ROW, **change))
