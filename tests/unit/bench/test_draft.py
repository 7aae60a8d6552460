"""The measurement of steps with several rows of a sequence: what is asked of ranks, and how rows add up."""

import pytest

from bench.draft.__main__ import cases, parse
from bench.draft.plans import ANSWER, CONTEXT, SEQUENCE, Plans, num_blocks
from bench.draft.rows import Case, rows_of
from longleaf.channel.sequences import Sequences
from longleaf.channel.step import Decode, Row, StepPlan

BLOCK_SIZE = 4


def row(plan: StepPlan) -> Row:
    assert isinstance(plan.work, Decode)
    (found,) = plan.work.rows
    return found


@pytest.mark.parametrize(("num_keys", "world_size"), [(1, 1), (30, 1), (30, 2), (8, 3)])
def test_the_first_plan_tells_of_all_keys_on_all_ranks(num_keys: int, world_size: int) -> None:
    told = row(Plans(num_keys, world_size, BLOCK_SIZE).told())
    assert (told.path, told.token_index) == ((CONTEXT,), -1)
    assert [i for run in told.runs for i in range(run.start, run.end)] == list(range(num_keys))
    assert len({run.rank for run in told.runs}) == len(told.runs) <= world_size


def test_rows_of_the_sequence_follow_one_another_in_blocks_of_their_own() -> None:
    plans, sequences = Plans(30, 2, BLOCK_SIZE), Sequences(BLOCK_SIZE)
    told = row(plans.told())
    taken = {block for run in told.runs for block in run.blocks}
    end, counts = 30, (1, 8, 2, 4)
    for index, count in enumerate(counts):
        found = row(sequences.complete(plans.next(count)))
        assert (found.sequence, found.path, found.token_index) == (SEQUENCE, (CONTEXT, ANSWER), index)
        assert (found.start, found.num_tokens) == (end, count)
        end += count
        (run,) = found.runs
        assert (run.rank, run.start, run.end) == (0, 30, end)
        assert not taken.intersection(run.blocks) and max(run.blocks) < num_blocks(30, sum(counts), 2, BLOCK_SIZE)


def test_ratios_are_those_of_medians_to_one_row() -> None:
    case = Case(64_000, "auto", 2)
    one, eight = rows_of("embedded", case, {8: [0.002, 0.006, 0.003], 1: [0.001, 0.002, 0.004]})
    assert (one["rows"], one["ratio"], one["ratio_min"], one["ratio_max"]) == (1, 1.0, 1.0, 1.0)
    assert (eight["rows"], eight["step_ms"], eight["ratio"]) == (8, 3.0, 1.5)
    assert (eight["ratio_min"], eight["ratio_max"], eight["repeats"]) == (0.75, 3.0, 3)
    assert (eight["kv_dtype"], eight["world_size"], eight["context_tokens"]) == ("float32", 2, 64_000)


def test_all_that_is_asked_for_is_measured_the_shortest_first() -> None:
    options = parse(["--context", "64", "8", "--world-size", "1", "2", "--kv-dtype", "auto", "int8"])
    found = cases(options)
    assert [case.context_tokens for case in found] == [8] * 4 + [64] * 4
    assert len(set(found)) == 8


@pytest.mark.parametrize("given", [["--repeats", "0"], ["--context", "0"], ["--world-size", "0"]])
def test_what_is_too_little_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(given)
    assert "at least 1" in capsys.readouterr().err
