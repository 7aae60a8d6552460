"""The block table of ranks without a model, when runs are moved."""

import pytest

from longleaf.rank_protocol.snapshots import Save
from longleaf.rank_protocol.step import (
    Decode,
    Move,
    Prefill,
    Restore,
    RestorePortion,
    Row,
    RunTransfer,
    SamplingTerms,
    StepPlan,
)
from longleaf.runs import Run
from longleaf.sampling import SamplingParams
from tests.support.fakes.echo_model import echo_token
from tests.support.fakes.workers import EchoBlockTable

FIRST, SECOND = Run(0, 0, 4, (0,)), Run(1, 4, 8, (0,))


def do(block_table, work):
    return block_table.apply(StepPlan(1, 1, work))


def test_moved_run_is_only_at_its_new_rank():
    block_table, target = EchoBlockTable(4), Run(1, 0, 4, (9,))
    do(block_table, Prefill((3,), 0, tuple(range(8)), (FIRST, SECOND)))
    do(block_table, Move((RunTransfer(3, FIRST, target),)))
    with pytest.raises(AssertionError, match="no such run"):
        do(block_table, Move((RunTransfer(3, FIRST, Run(1, 0, 4, (8,))),)))
    do(block_table, Decode((Row(1, (3, 4), 8, (5,), (Run(0, 8, 9, (0,)),), 0, SamplingTerms(SamplingParams())),)))
    with pytest.raises(AssertionError, match="in two runs"):
        do(block_table, Move((RunTransfer(3, SECOND, Run(0, 4, 8, (0,))),)))


def test_first_blocks_of_a_run_can_be_moved():
    block_table, whole = EchoBlockTable(4), Run(0, 0, 10, (0, 1, 2))
    do(block_table, Prefill((3,), 0, tuple(range(10)), (whole,)))
    do(block_table, Move((RunTransfer(3, Run(0, 0, 8, (0, 1)), Run(1, 0, 8, (4, 5))),)))
    do(block_table, Move((RunTransfer(3, Run(0, 8, 10, (2,)), Run(1, 8, 10, (0,))),)))
    do(block_table, Decode((Row(1, (3, 4), 10, (5,), (Run(0, 10, 11, (0,)),), 0, SamplingTerms(SamplingParams())),)))
    with pytest.raises(AssertionError, match="no such run"):
        do(block_table, Move((RunTransfer(3, Run(1, 0, 6, (4, 5)), Run(0, 0, 6, (7, 8))),)))


def test_saved_and_fetched_blocks_are_restored():
    block_table = EchoBlockTable(4)
    do(block_table, Prefill((3,), 0, tuple(range(10, 18)), (FIRST, SECOND)))
    content = block_table.save(Save(1, "p", 3, (SECOND,)))
    assert content == {position: 10 + position for position in range(4, 8)}
    with pytest.raises(AssertionError, match="not held"):
        block_table.save(Save(1, "p", 3, (Run(1, 4, 8, (1,)),)))
    block_table.replace([])
    back = Restore(5, 0, (RestorePortion(2, (Run(0, 4, 8, (6,)),)),))
    with pytest.raises(AssertionError, match="not fetched"):
        EchoBlockTable(4).apply(StepPlan(1, 1, back))
    block_table.fetched[0, 2] = content
    with pytest.raises(AssertionError, match="no such positions"):
        do(block_table, Restore(6, 0, (RestorePortion(2, (Run(0, 0, 8, (7, 8)),)),)))
    block_table.replace([])
    do(block_table, back)
    with pytest.raises(AssertionError, match="held twice"):
        do(block_table, back)


def test_rank_checks_only_blocks_that_it_receives():
    block_table, portion = EchoBlockTable(4, rank=1), RestorePortion(2, (Run(0, 4, 8, (6,)),))
    do(block_table, Restore(5, 0, (portion,)))
    do(block_table, Prefill((5,), 0, tuple(range(4)), (Run(1, 0, 4, (3,)),)))
    do(block_table, Decode((Row(1, (5, 4), 8, (5,), (Run(0, 8, 9, (0,)),), 0, SamplingTerms(SamplingParams())),)))


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_rejected_drafts_are_removed(num_right):
    block_table, answer = EchoBlockTable(8), [echo_token(5, 0)]
    for index in range(1, 6):
        answer.append(echo_token(answer[-1], index))
    drafts = (*answer[:num_right], *[999] * (3 - num_right))
    do(block_table, Prefill((3,), 0, tuple(range(8)), (Run(0, 0, 8, (0,)),)))
    first = Row(1, (3, 4), 8, (5,), (Run(0, 8, 12, (1,)),), 0, SamplingTerms(SamplingParams()), draft_ids=drafts)
    tokens = do(block_table, Decode((first,)))
    assert [token.id for token in tokens[1]] == answer[: num_right + 1]
    end = 9 + num_right
    assert block_table.token_ids((3, 4)) == [*range(8), 5, *answer[:num_right]]
    tokens = do(block_table, Decode((Row(1, (3, 4), end, (), (Run(0, 8, end + 1, (1,)),), num_right + 1),)))
    assert [token.id for token in tokens[1]] == [answer[num_right + 1]]
    with pytest.raises(AssertionError, match="nobody brought"):
        do(block_table, Decode((Row(1, (3, 4), end + 2, (), (Run(0, 8, end + 3, (1,)),), 5),)))


def test_draft_allocates_no_block():
    block_table = EchoBlockTable(4)
    do(block_table, Prefill((3,), 0, tuple(range(4)), (FIRST,)))
    for runs in ((Run(0, 4, 9, (1, 2)),), (Run(0, 4, 8, (1,)), Run(1, 8, 9, (1,)))):
        with pytest.raises(AssertionError, match="opens a block"):
            do(
                block_table,
                Decode((Row(1, (3, 4), 4, (5,), runs, 0, SamplingTerms(SamplingParams()), draft_ids=(1, 2, 3, 4)),)),
            )
        block_table = EchoBlockTable(4)
        do(block_table, Prefill((3,), 0, tuple(range(4)), (FIRST,)))
