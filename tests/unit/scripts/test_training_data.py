"""The embedded model's training sequences: who sees what, and that the demo's wording is not among them."""

import math
import random
from dataclasses import replace

import embedded_data as data
import embedded_wording as wording
import pytest
import torch
from embedded_facts import MOST_BYTES
from embedded_phase import Phase

from longleaf.demo.facts import HELD_OUT_WORDS, TEMPLATES, Fact
from longleaf.demo.haystack import canonical

pytestmark = pytest.mark.slow
PHASE = Phase(length=512, batch=4, questions=3, most_facts=4, repeats=0.25, easy=False, log_copies=5.0)


@pytest.fixture(scope="module")
def sampler() -> data.Sampler:
    """One for all tests: it reads the whole standard library."""
    return data.Sampler(3)


def draw(sampler: data.Sampler, seed: int) -> data.Batch:
    sampler.rng.seed(seed)
    return sampler.batch(PHASE)


@pytest.fixture(scope="module")
def batch(sampler: data.Sampler) -> data.Batch:
    return draw(sampler, 3)


def test_a_batch_follows_from_its_seed(sampler: data.Sampler, batch: data.Batch) -> None:
    assert torch.equal(draw(sampler, 3).ids, batch.ids)
    assert not torch.equal(draw(sampler, 4).ids, batch.ids)
    assert batch.ids.shape == (4, 513)
    assert batch.weights.shape == batch.segments.shape == batch.owners.shape == (4, 512)


def test_a_question_sees_all_documents_and_itself(batch: data.Batch) -> None:
    rows = data.predicted(batch)
    mask = data.attention_mask(batch, rows).view(len(rows), 4, 512)
    for row, seen in zip(rows.tolist(), mask > -math.inf, strict=True):
        sequence, place = divmod(row, 512)
        segment = batch.segments[sequence, place]
        if segment == 0:
            assert seen.sum() == place + 1, "a document's token sees what is before it"
            continue
        own = seen[sequence]
        assert torch.equal(own[batch.segments[sequence] == 0], torch.ones_like(own[batch.segments[sequence] == 0]))
        assert (
            own[batch.segments[sequence] == segment].sum() == (batch.segments[sequence, : place + 1] == segment).sum()
        )
        others = (batch.segments[sequence] != 0) & (batch.segments[sequence] != segment)
        assert not own[others].any()
        for other in set(range(4)) - {sequence}:
            assert torch.equal(seen[other], (batch.segments[other] == 0) & (batch.owners[other] != data.OUTSIDE))


def test_the_asked_fact_never_counts_for_more_than_it_is(batch: data.Batch) -> None:
    rows = data.predicted(batch)
    mask = data.attention_mask(batch, rows).view(len(rows), 4, 512)
    for row, bias in zip(rows.tolist(), mask, strict=True):
        sequence, place = divmod(row, 512)
        segment = batch.segments[sequence, place]
        asked = batch.asked[sequence, segment]
        visible = bias[bias > -math.inf]
        assert ((visible >= 0) & (visible <= PHASE.log_copies)).all()
        if segment > 0 and asked >= 0:
            assert (bias[sequence][batch.owners[sequence] == asked] == 0).all()


def test_the_demos_questions_and_words_are_held_out(sampler: data.Sampler) -> None:
    early, late = (
        (*wording.ABOUT_ATTRIBUTE, *wording.ABOUT_KEY),
        (*wording.MORE_ABOUT_ATTRIBUTE, *wording.MORE_ABOUT_KEY),
    )
    frames = {frame.lower() for frame in (*early, *late)}
    assert not {question.replace('"', "").lower() for _, question in TEMPLATES} & frames
    rng = random.Random(0)
    sentences = [wording.statement(rng, "{attribute}", "{key}", "{value}") for _ in range(5000)]
    worded = {sentence for sentence, _ in TEMPLATES if "{attribute}" in sentence or "magic" in sentence}
    assert not worded & set(sentences)
    assert not {sampler.text.word() for _ in range(5000)} & set(HELD_OUT_WORDS)


def facts_of_a_batch(sampler: data.Sampler, seed: int) -> list[Fact]:
    draw(sampler, seed)  # chooses the batch's words
    sampler.facts.taken.clear()
    return [fact for _ in range(16) for fact in sampler.facts.document_facts(replace(PHASE, most_facts=6))]


def test_facts_of_a_batch_share_words_and_beginnings_but_never_a_key(sampler: data.Sampler) -> None:
    facts = facts_of_a_batch(sampler, 5)
    assert len({canonical(fact.key) for fact in facts}) == len(facts)
    beginnings = [fact.value.split()[0] for fact in facts if " " in fact.value]
    assert len(set(beginnings)) < len(beginnings), "a value's first word alone does not tell what follows"
    digits = [fact.value[:3] for fact in facts if fact.value[:3].isdigit()]
    assert len(set(digits)) < len(digits)


BARE = replace(PHASE, length=1024, batch=12, repeats=0.0, bare=0.5, lists=0.5, is_last=True)


@pytest.fixture(scope="module")
def bare(sampler: data.Sampler) -> data.Batch:
    sampler.rng.seed(7)
    return sampler.batch(BARE)


def test_a_few_facts_are_seen_alone(bare: data.Batch) -> None:
    assert 0 < bare.is_alone.sum() < len(bare.is_alone)
    rows = data.predicted(bare)
    mask = data.attention_mask(bare, rows).view(len(rows), BARE.batch, BARE.length)
    for row, seen in zip(rows.tolist(), mask > -math.inf, strict=True):
        sequence, place = divmod(row, BARE.length)
        others = [number for number in range(BARE.batch) if number != sequence]
        assert seen[others].any() != bool(bare.is_alone[sequence])
        assert seen[sequence][: place + 1].any()


def test_bare_documents_hold_what_is_asked_for_right_before_the_question(sampler: data.Sampler) -> None:
    sampler.rng.seed(8)
    sampler.facts.start_batch(BARE)
    sampler.bare.start_batch()
    lengths: list[int] = []
    for draw_document in (sampler.bare.few, sampler.bare.numbered) * 20:
        found = draw_document(BARE)
        assert len(found.data) == len(found.owners)
        lengths.append(len(found.data))
        for fact, index in found.asked:
            own = bytes(byte for byte, owner in zip(found.data, found.owners, strict=True) if owner == index)
            assert index < 0 or own.decode().strip() == fact.sentence.strip()
            assert (index < 0) == (fact.value == "")
            assert index >= 0 or fact.key not in found.data.decode()
    assert min(lengths) < data.GAP < max(lengths)


def test_the_other_phases_draw_as_if_there_were_no_bare_documents(sampler: data.Sampler, batch: data.Batch) -> None:
    again = draw(sampler, 3)
    assert torch.equal(again.ids, batch.ids)
    assert not again.is_alone.any()


@pytest.mark.parametrize("is_last", [False, True])
def test_questions_are_within_the_reach_of_the_local_layers(sampler: data.Sampler, is_last: bool) -> None:
    phase = replace(PHASE, is_last=is_last)
    questions = [sampler.facts.fact(sampler.facts.key(False, 0.0), phase).question for _ in range(500)]
    assert max(len(question.encode()) for question in questions) <= MOST_BYTES


def test_the_first_byte_of_a_value_decides_and_the_places_where_values_part_count() -> None:
    answer = b"ash is oak elm 7"
    weights = data.answer_weights(answer, len("ash is "))
    assert len(weights) == len(answer) + 1, "the end token, too"
    assert weights.index(data.FIRST_BYTE_WEIGHT) == len("ash is ")
    inside, parting = weights[len("ash is o")], weights[len("ash is oak")]
    assert inside < parting < data.FIRST_BYTE_WEIGHT
    assert parting == weights[len("ash is oak ")] == weights[-1]
    late = data.answer_weights(answer, len("ash is "), is_last=True)
    assert len(late) == len(weights)
    assert late[len("ash is ") :] == weights[len("ash is ") :]
    assert late[len("ash")] > weights[len("ash")], "where the key ends"
