"""Documents that are facts and nothing else, and the page of what was found in them."""

import random

import pytest

from bench import bare
from bench.harness.machine import describe
from bench.report import page
from longleaf.demo.facts import Fact, is_correct


@pytest.mark.parametrize("kind", bare.KINDS)
@pytest.mark.parametrize("count", [1, 20])
def test_each_line_is_a_fact_that_can_be_asked_for(kind: str, count: int) -> None:
    make = bare.KINDS[kind][0]
    text, questions = make(random.Random(3), count)
    lines = text.split("\n")
    assert len(lines) == len(questions) == len({question.text for question in questions}) == count
    for line, question in zip(lines, questions, strict=True):
        assert is_correct(line, Fact("", question.values[0], "", "", ""))
        assert question.is_answered(f"it is {question.values[0]}")
    assert make(random.Random(3), count)[0] == text


def test_a_row_is_a_line_of_the_page() -> None:
    row = {"kind": "numbered", "facts": 3000, "asked": 100, "right": 80, "low": 0.711, "high": 0.867, "ended": 99}
    lines = page({"bare": [row | {"machine": describe()}]}).splitlines()
    assert "| numbered | 3,000 | 80% (71% - 87%) of 100 | 99% |" in lines
