"""Properties of step plans."""

import pytest
from msgspec.structs import replace

from longleaf.positions import EVERY_RANK
from longleaf.rank_protocol.encoding import decode_to_rank, encode
from longleaf.rank_protocol.row_delta import RowState
from longleaf.rank_protocol.step import Decode, Move, Prefill, Row, RunTransfer, StepPlan
from longleaf.runs import Run

ROW = Row(1, (1,), 4, (), (), 0)
PLAN = StepPlan(1, 1, Decode((ROW,)))
MOVE = Move((RunTransfer(4, Run(0, 8, 14, (1, 2)), Run(1, 8, 14, (5, 3))),), (Run(EVERY_RANK, 3, 14, (0, 4, 1)),))


@pytest.mark.parametrize(
    ("plan", "may_overlap"),
    [
        (PLAN, True),
        (replace(PLAN, work=Prefill((1,), 0, (5, 6), ())), False),
        (replace(PLAN, work=MOVE), False),
        (replace(PLAN, release_sequences=(2,)), False),
        (replace(PLAN, work=Decode((ROW, replace(ROW, sequence=2, num_reference=100_000)))), False),
        (replace(PLAN, work=Decode((ROW, replace(ROW, sequence=2, draft_ids=(7,))))), False),
    ],
    ids=["rows", "a chunk", "a move", "a sequence ends", "an answer is compared", "drafts are verified"],
)
def test_work_that_depends_on_the_last_answer_is_not_started_early(plan, may_overlap):
    assert plan.may_overlap == may_overlap


def test_drafts_count_as_computed_tokens():
    plan = replace(
        PLAN, work=Decode((replace(ROW, draft_ids=(7, 8, 9)), replace(ROW, token_ids=(4, 5), draft_ids=(6,))))
    )
    assert decode_to_rank(encode(plan)) == plan == RowState(4).complete(plan)
    assert [(row.num_known, row.num_tokens) for row in plan.work.rows] == [(1, 4), (2, 3)]
    assert (plan.num_tokens, plan.num_drafts) == (7, 4)


def test_move_survives_encoding_and_counts_its_tokens():
    plan = replace(PLAN, work=MOVE)
    assert decode_to_rank(encode(plan)) == plan == RowState(4).complete(plan)
    assert (plan.num_tokens, plan.num_reference) == (6 + 11, 0)
