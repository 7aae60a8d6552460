"""The measurement of provenance: what counts as found, and how rows add up."""

import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.parts import beside, gathered, kept, told
from bench.harness.subjects import EMBEDDED
from bench.needle.documents import Question, prose
from bench.provenance.__main__ import MEASURED, line, num_together, parse
from bench.provenance.asking import Asked, Place, judged
from bench.provenance.chart import draw
from bench.provenance.rows import Row, area, rows
from longleaf.messages import Source

QUESTION = Question("single_prose", "What is the code?", ("4711",), 0.5)


def source(start: int, share: float, drop: float | None = None) -> Source:
    return Source(
        token_start=start,
        token_end=start + 64,
        share=share,
        largest_share=share,
        largest_layer=0,
        largest_head=0,
        drop=drop,
    )


@pytest.mark.parametrize(
    ("start", "end", "meets"), [(0, 64, False), (64, 65, True), (127, 200, True), (128, 130, False)]
)
def test_a_source_is_right_where_it_shares_a_token_with_the_fact(start: int, end: int, meets: bool) -> None:
    assert Place(start, end).meets(source(64, 0.5)) is meets


def test_what_was_told_is_judged_by_its_order_and_by_its_drops() -> None:
    sources = [source(0, 0.5, 0.1), source(64, 0.3, 7.0), source(128, 0.1)]
    found = judged(QUESTION, "it is 4711", sources, Place(70, 90), 4000, "raw")
    assert (found.is_right, found.rank, found.has_largest_drop, found.share, found.drop) == (True, 1, True, 0.5, 7.0)
    missed = judged(QUESTION, "not found", sources[:1], Place(70, 90), 4000, "raw")
    assert (missed.is_right, missed.rank, missed.has_largest_drop) == (False, None, False)
    assert judged(QUESTION, "", [], None, 4000, "raw").rank is None


def asked(task: str, rank: int | None, share: float, *, is_right: bool = True) -> Asked:
    return Asked(task, 4000, "raw", is_right, rank, rank == 0, share, 10 * share)


def test_rows_tell_right_answers_apart_from_wrong_ones() -> None:
    found = [asked("single_prose", rank, 0.4) for rank in (0, 0, 2, 5, None)]
    found += [asked("single_prose", None, 0.1, is_right=False), asked("absent", None, 0.2)]
    found += [asked("absent", None, 0.4, is_right=False)]
    wrong_or_right = {row["answers"]: row for row in rows(found) if row["task"] == "single_prose"}
    right = wrong_or_right["right"]
    assert (right["top1"], right["top3"], right["drop_is_largest"], right["of"]) == (2, 3, 2, 5)
    assert (wrong_or_right["wrong"]["top1"], wrong_or_right["wrong"]["of"]) == (0, 1)
    [apart] = [row for row in rows(found) if row["task"] == "held_or_absent"]
    assert (apart["area_by_share"], apart["area_by_drop"], apart["of"]) == (0.75, 0.75, 7)
    assert (apart["absent"], apart["invented"]) == (2, 1)


def test_an_area_counts_who_is_larger() -> None:
    assert area([2.0, 3.0], [1.0]) == 1.0
    assert area([1.0], [2.0]) == 0.0
    assert area([1.0], [1.0]) == 0.5


def test_rows_that_are_measured_anew_stand_instead_of_the_old_ones() -> None:
    before = [{"model": model, "tokens": 4000, "task": task} for model in "ab" for task in ("absent", "cost")]
    new = [{**before[1], "more": 0.1}, {**before[0], "tokens": 8000}]
    assert beside(before, new, MEASURED) == [before[0], *before[2:], *new]
    assert beside([], new, MEASURED) == new


@pytest.mark.parametrize("is_json", [False, True])
def test_a_run_that_is_broken_off_loses_no_row(
    is_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "provenance.json"
    old = [{"model": "a", "tokens": 8000, "task": "cost"}, {"model": "b", "tokens": 9, "task": "cost"}]
    file.write_text(told("provenance", old))
    given, new = Namespace(into=file, json=is_json), {"model": "a", "tokens": 4000, "task": "cost"}

    def measured() -> Iterator[Row]:
        yield new
        yield {**old[1], "more": 0.1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gathered("provenance", measured(), given, MEASURED, line, lambda row: (row["model"], row["tokens"]))
    assert kept(file) == [new, old[0], {**old[1], "more": 0.1}]
    shown = capsys.readouterr()
    assert "tokens 9  task cost  more 0.1" in (shown.err if is_json else shown.out)


def test_what_was_found_is_drawn_and_what_it_costs_is_not(tmp_path: Path) -> None:
    found = [asked("single_prose", 0, 0.4), asked("absent", None, 0.2)]
    wrong = [asked("single_prose", None, 0.1, is_right=False)]
    all_rows = [{"model": model, **row} for model, all_of in (("a", found), ("b", wrong)) for row in rows(all_of)]
    cost = {"model": "c", "tokens": 4000, "task": "cost", "method": "raw", "more": 0.1}
    draw([*all_rows, cost], tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    draw([cost], tmp_path / "cost.png")
    assert not (tmp_path / "cost.png").exists()


@pytest.mark.parametrize("tokens", [4_000, 16_000, 64_000])
def test_what_is_asked_for_fits_into_a_document(tokens: int) -> None:
    made = prose(random.Random(1), tokens, num_together(tokens))
    assert len(made.text.encode()) == pytest.approx(tokens, rel=0.02)


def test_models_are_named_or_lie_in_a_folder() -> None:
    assert parse([]).model == EMBEDDED
    given = parse(["--model", "some/folder", "--lengths"])
    assert (given.model, given.lengths) == ("some/folder", [])


@pytest.mark.parametrize("arguments", [["--questions", "0"], ["--repeats", "0"], ["--world-size", "0"]])
def test_what_cannot_be_measured_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "error" in capsys.readouterr().err
