"""Sources as a reader sees them."""

from typing import Any

import pytest
from msgspec.structs import replace

from longleaf.citation import cite, joined
from longleaf.types import ContextText, Source

SOURCE = Source(token_start=4, token_end=9, share=0.25, largest_share=0.5, largest_layer=0, largest_head=0, drop=1.5)


@pytest.mark.parametrize(
    ("text", "lines", "place"),
    [
        ("one", (7, 7), "a.txt:7"),
        ("one\ntwo\n", (7, 8), "a.txt:7-8"),
        (" \n\n one\ntwo", (9, 10), "a.txt:9-10"),
        ("", (7, 7), "a.txt:7"),
        (" \n", (8, 8), "a.txt:8"),
    ],
)
def test_lines_are_those_of_the_visible_text(text: str, lines: tuple[int, int], place: str) -> None:
    found = cite(SOURCE, ContextText(text=text, token_start=4, token_end=9, file="a.txt", line=7))
    assert (found.line_start, found.line_end) == lines
    assert found.place == place
    assert (found.text, found.share, found.drop) == (text.strip(), 0.25, 1.5)


def test_unknown_file_has_no_place() -> None:
    assert cite(SOURCE, ContextText(text="x", token_start=4, token_end=9, line=3)).place == ""
    found = cite(SOURCE, ContextText(text="x", token_start=4, token_end=9))
    assert (found.place, found.line_start, found.line_end) == ("", None, None)


def test_place_of_extracted_text_is_its_page() -> None:
    text = ContextText(text="x", token_start=4, token_end=9, file="report.pdf, page 7", line=3)
    assert cite(SOURCE, text).place == cite(SOURCE, text).label == "report.pdf, page 7"


@pytest.mark.parametrize(
    ("first", "last", "place"),
    [
        ("a.txt", "b/c.txt", "a.txt:7 to b/c.txt"),
        ("report.pdf, page 7", "report.pdf, page 8", "report.pdf, page 7 to page 8"),
        ("report.pdf, page 7", "notes.md", "report.pdf, page 7 to notes.md"),
        ("notes.md", "slides.pptx, slide 1", "notes.md:7 to slides.pptx, slide 1"),
    ],
)
def test_place_of_text_of_several_files_names_the_first_and_the_last(first: str, last: str, place: str) -> None:
    text = ContextText(text="x\ny", token_start=4, token_end=9, file=first, line=7, last_file=last)
    found = cite(SOURCE, text)
    assert (found.place, found.line_end) == (place, None)


def test_label_is_the_best_known_position() -> None:
    def label(**text: Any) -> str:
        return cite(SOURCE, ContextText(token_start=4, token_end=9, **text)).label

    assert label(text="x\ny", file="a.txt", line=1_200) == "a.txt:1200-1201"
    assert label(text="x\ny", line=1_200) == "lines 1,200-1,201"
    assert label(text="x", line=3) == "line 3"
    assert label(text="x") == cite(SOURCE, None).label == "tokens 4-9"


def test_citation_of_unread_text_has_its_numbers() -> None:
    found = cite(SOURCE, None)
    assert (found.text, found.bytes, found.tokens, found.share, found.drop) == ("", None, (4, 9), 0.25, 1.5)


def source(start: int, end: int, share: float, drop: float | None = None) -> Source:
    return Source(
        token_start=start,
        token_end=end,
        share=share,
        largest_share=share,
        largest_layer=int(start),
        largest_head=0,
        contrast=share,
        drop=drop,
        bytes=(start, end),
        file="a",
    )


def test_adjacent_sources_are_merged() -> None:
    one, two, three, other = (
        source(32, 64, 0.25, 1.0),
        source(0, 32, 0.125, 3.0),
        source(64, 70, 0.0),
        source(99, 100, 0.2),
    )
    first, second = joined([other, one, two, three])
    assert first == other
    assert (second.token_start, second.token_end, second.share, second.drop) == (0, 70, 0.375, 3.0)
    assert (second.contrast, second.bytes, second.largest_layer) == (0.375, (0, 70), 32)
    assert joined([]) == []


def test_sources_of_different_files_are_not_merged() -> None:
    one, two = source(0, 32, 0.25), replace(source(32, 64, 0.125), file="b")
    assert joined([one, two]) == [one, two]
