"""The needles: documents that follow from a seed, questions with known answers, answers that survive a break."""

import random
import re
from pathlib import Path

import pytest

from bench.needle.answers import Answer, Answers, Place, rows, wilson
from bench.needle.chart import draw
from bench.needle.documents import MAKERS, TASKS, TWINS, Question, prose, size_of, twins
from longleaf.demo.haystack import canonical, distinct_facts


@pytest.mark.parametrize("kind", MAKERS)
def test_a_document_follows_from_its_seed(kind: str) -> None:
    made = [MAKERS[kind](random.Random(seed), 5_000, 2) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert len(made[0].text.encode()) == pytest.approx(5_000, rel=0.02)
    assert {q.task for q in (*made[0].questions, *made[0].later_questions)} == set(TASKS[kind])


@pytest.mark.parametrize("kind", MAKERS)
def test_a_document_is_as_long_in_the_tokens_of_the_model_as_was_wanted(kind: str) -> None:
    class Client:
        def count_tokens(self, text: str) -> int:
            return len(text.encode()) // 4

    assert size_of(Client(), kind, 5_000) == pytest.approx(20_000, rel=0.01)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_asked_can_be_answered(kind: str) -> None:
    made = MAKERS[kind](random.Random(3), 20_000, 4)
    for text, questions in ((made.text, made.questions), (made.appended, made.later_questions)):
        for question in questions:
            assert all(value in text for value in question.values)
            assert bool(question.values) == (question.task != "absent")
            assert question.is_answered(" ".join(question.values) or "not found")
            assert not question.is_answered("nothing")


def test_near_duplicates_differ_in_one_part_only() -> None:
    made = prose(random.Random(5), 20_000, 4)
    for question in made.questions:
        if question.task == "near_duplicate":
            assert made.text.count(question.values[0]) == 1
    rng = random.Random(5)
    facts = distinct_facts(rng, 8)
    for number, twin in enumerate(doubles := twins(rng, facts[:4], facts)):
        parts, others = (re.split("[ _-]", fact.key) for fact in (twin, facts[number // TWINS]))
        assert sum(a == b for a, b in zip(parts, others, strict=True)) == 1
    assert len(doubles) == 4 * TWINS
    assert len({canonical(fact.key) for fact in (*facts, *doubles)}) == 8 + 4 * TWINS
    assert canonical("Amber-Fox") == canonical("amber fox") != canonical("amber foxes")


def test_all_values_are_wanted() -> None:
    question = Question("multi_value", "?", ("12", "34"), None)
    assert question.is_answered("12 and 34")
    assert not question.is_answered("12 and 345")


def answer(task: str, number: int, depth: float | None, right: bool) -> Answer:
    place = Place("m", 0, 4000, number // 5, 5, task, number)
    return Answer(place, depth, "?", ("1",), "1", right, 4001, 100.0, 0.5)


def test_answers_survive_a_break_and_become_rows(tmp_path: Path) -> None:
    path = tmp_path / "needle.jsonl"
    answers = Answers(path)
    for i in range(10):
        answers.add(answer("single", i, i / 10 + 0.05, i != 0))
    answers.add(answer("absent", 0, None, True))
    again = Answers(path)
    assert list(again) == list(answers)
    assert answer("single", 3, 0.0, True).place in again
    found = {(row["task"], row["depth"]): row for row in rows(again)}
    assert len(found) == 12
    assert (found["single", None]["right"], found["single", None]["documents"]) == (9, 2)
    assert found["single", 0.0]["accuracy"] == 0.0
    draw(rows(again), tmp_path / "needle.png")
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")


def test_the_interval_is_wilsons() -> None:
    low, high = wilson(97, 100)  # as R's prop.test without correction gives it
    assert (low, high) == pytest.approx((0.9155, 0.9897), abs=1e-4)
    assert wilson(5, 5)[1] == 1.0
    assert wilson(0, 5)[0] == 0.0
