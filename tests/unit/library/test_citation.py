"""Sources as a reader sees them."""

import pytest

from longleaf.citation import cite
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
