"""The demo's documents: seeded, of the requested size, with every fact exactly once."""

import random

import pytest
from embedded_text import TRAIN_WORDS
from hypothesis import given, settings
from hypothesis import strategies as st

from longleaf.demo.facts import EVALUATION_WORDS, Fact, absent_fact, evaluation_fact, is_correct
from longleaf.demo.haystack import (
    DISTRACTOR_EVERY,
    cut,
    distinct_facts,
    library_files,
    library_text,
    make_haystack,
    plant,
)


@pytest.mark.parametrize("tokens", [2_000, 16_000, 100_000])
def test_size_is_within_one_percent(tokens: int) -> None:
    assert len(make_haystack(1, tokens).text.encode()) == pytest.approx(tokens, rel=0.01)


def test_same_seed_gives_same_document() -> None:
    assert make_haystack(7, 8_000) == make_haystack(7, 8_000)
    assert make_haystack(7, 8_000).text != make_haystack(8, 8_000).text


@pytest.mark.parametrize("seed", range(8))
def test_facts_are_in_the_text_exactly_once(seed: int) -> None:
    haystack = make_haystack(seed, 30_000, facts=6, absent=4)
    data = haystack.text.encode()
    for fact, offset in zip(haystack.facts, haystack.offsets, strict=True):
        sentence = fact.sentence.encode()
        assert data.count(sentence) == 1
        assert data[offset : offset + len(sentence)] == sentence
        assert offset == 0 or data[offset - 1 : offset] == b"\n"
        assert fact.expected == f"{fact.key} is {fact.value}"
    assert list(haystack.offsets) == sorted(haystack.offsets)
    assert len(haystack.absent) == 4
    assert all(fact.key.lower() not in haystack.text.lower() for fact in haystack.absent)


def test_facts_are_spread_over_the_document() -> None:
    offsets = make_haystack(3, 50_000, facts=10).offsets
    assert offsets[0] < 20_000
    assert offsets[-1] > 30_000


def test_document_holds_distractors() -> None:
    rng = random.Random(0)
    few, many = make_haystack(1, 4 * DISTRACTOR_EVERY), make_haystack(1, 4 * DISTRACTOR_EVERY, facts=9)
    assert len(few.facts) == 5
    assert len(many.facts) == 9
    planted = [evaluation_fact(rng).sentence for _ in range(40)]
    text = plant(rng, library_text(rng, 5_000), planted)
    places = [text.index(sentence) for sentence in planted]
    assert places == sorted(places)


def test_held_out_words_and_files_are_disjoint() -> None:
    assert not set(EVALUATION_WORDS) & set(TRAIN_WORDS)
    held_out, train = set(library_files("held_out")), set(library_files("train"))
    assert held_out
    assert not held_out & train
    assert held_out | train == set(library_files("all"))


@settings(max_examples=200)
@given(text=st.text(), size=st.integers(0, 60))
def test_cut_keeps_whole_characters(text: str, size: int) -> None:
    short = cut(text, size)
    assert text.startswith(short)
    assert len(short.encode()) <= size
    assert short == text or len(short.encode()) > size - 4


@settings(max_examples=100)
@given(text=st.text(), count=st.integers(0, 5), seed=st.integers(0, 1000))
def test_planting_only_adds_whole_lines(text: str, count: int, seed: int) -> None:
    rng = random.Random(seed)
    sentences = [evaluation_fact(rng).sentence for _ in range(count)]
    planted = plant(rng, text, sentences)
    for sentence in sentences:
        assert sentence in planted.split("\n")
        planted = planted.replace(sentence + "\n", "", 1)
    assert planted.replace("\n", "") == text.replace("\n", "")


@pytest.mark.parametrize("text", ["word " * 2000, "x" * 10_000, "one line\n" * 1000])
def test_facts_are_spread_over_any_text(text: str) -> None:
    rng = random.Random(0)
    sentences = [fact.sentence for fact in distinct_facts(rng, 5)]
    planted = plant(rng, text, sentences)
    depths = [planted.index(sentence) / len(planted) for sentence in sentences]
    assert all(i / 5 - 0.05 < depth < (i + 1) / 5 + 0.05 for i, depth in enumerate(depths))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("amber fox is 1234", True),
        ("1234.", True),
        ("amber fox is 12345", False),
        ("amber fox is 99-1234", False),
        ("not found", False),
        ("", False),
    ],
)
def test_answer_must_hold_the_whole_value(answer: str, right: bool) -> None:
    fact = Fact("amber fox", "1234", "amber fox = 1234", "What is amber fox?", "amber fox is 1234")
    assert is_correct(answer, fact) is right


def test_absent_key_wants_not_found() -> None:
    fact = absent_fact(random.Random(2))
    assert is_correct(" Not found", fact)
    assert not is_correct(f"{fact.key} is 12", fact)
