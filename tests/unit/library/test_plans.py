"""What a plan says of itself."""

import pytest
from msgspec.structs import replace

from longleaf.channel.step import Decode, Prefill, Row, StepPlan

ROW = Row(1, (1,), 4, (), (), 0)
PLAN = StepPlan(1, 1, Decode((ROW,)))


@pytest.mark.parametrize(
    ("plan", "may_overlap"),
    [
        (PLAN, True),
        (replace(PLAN, work=Prefill((1,), 0, (5, 6), ())), False),
        (replace(PLAN, release_sequences=(2,)), False),
        (replace(PLAN, work=Decode((ROW, replace(ROW, sequence=2, num_reference=100_000)))), False),
    ],
    ids=["rows", "a chunk", "a sequence ends", "an answer is compared"],
)
def test_what_keeps_the_answer_before_waiting_is_not_begun_before_it(plan, may_overlap):
    assert plan.may_overlap == may_overlap
