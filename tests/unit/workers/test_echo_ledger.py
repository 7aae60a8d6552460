"""The ledger of ranks without a model, when runs move."""

import pytest

from longleaf.channel.step import Decode, Move, Prefill, Row, StepPlan, Terms, Transfer
from longleaf.runs import Run
from longleaf.sampling import Sampling
from workers.fakes import EchoLedger

FIRST, SECOND = Run(0, 0, 4, (0,)), Run(1, 4, 8, (0,))


def do(ledger, work):
    return ledger.apply(StepPlan(1, 1, work))


def test_what_has_moved_is_at_its_new_place_alone():
    ledger, target = EchoLedger(4), Run(1, 0, 4, (9,))
    do(ledger, Prefill((3,), 0, tuple(range(8)), (FIRST, SECOND)))
    do(ledger, Move((Transfer(3, FIRST, target),)))
    with pytest.raises(AssertionError, match="no such run"):
        do(ledger, Move((Transfer(3, FIRST, Run(1, 0, 4, (8,))),)))
    do(ledger, Decode((Row(1, (3, 4), 8, (5,), (Run(0, 8, 9, (0,)),), 0, Terms(Sampling())),)))
    with pytest.raises(AssertionError, match="in two runs"):
        do(ledger, Move((Transfer(3, SECOND, Run(0, 4, 8, (0,))),)))


def test_the_first_blocks_of_a_run_may_move_alone():
    ledger, whole = EchoLedger(4), Run(0, 0, 10, (0, 1, 2))
    do(ledger, Prefill((3,), 0, tuple(range(10)), (whole,)))
    do(ledger, Move((Transfer(3, Run(0, 0, 8, (0, 1)), Run(1, 0, 8, (4, 5))),)))
    do(ledger, Move((Transfer(3, Run(0, 8, 10, (2,)), Run(1, 8, 10, (0,))),)))
    do(ledger, Decode((Row(1, (3, 4), 10, (5,), (Run(0, 10, 11, (0,)),), 0, Terms(Sampling())),)))
    with pytest.raises(AssertionError, match="no such run"):
        do(ledger, Move((Transfer(3, Run(1, 0, 6, (4, 5)), Run(0, 0, 6, (7, 8))),)))
