"""The table of families: kept rows, and the page made of them."""

import json

from bench import models
from bench.families import FAMILIES, REFUSED

EXACT = models.row("llama", True, 2.5e-6, 1024, (1, 2))
REFUSAL = models.row("bloom", refused="0 of 2 layers")


def test_the_page_shows_the_rows_that_are_kept():
    rows = json.loads(models.RESULTS.read_text())
    assert models.PAGE.read_text() == "\n".join(models.page(rows)) + "\n"
    assert [row["family"] for row in rows] == [*FAMILIES, *REFUSED]
    assert {row["family"] for row in rows if row["exact"]} == set(FAMILIES)
    assert all(row["refused"] for row in rows if not row["exact"])


def test_a_row_is_a_line():
    lines = list(models.page([EXACT, models.row("phi3", False, 1.0, 512, (3,)), REFUSAL]))
    assert "| llama | yes | 2.5e-06 | 1024 | 1, 2 |" in lines
    assert "| phi3 | no | 1.0e+00 | 512 | 3 |" in lines
    assert "| bloom | 0 of 2 layers |" in lines


def test_new_rows_take_the_place_of_old_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "RESULTS", tmp_path / "rows.json")
    monkeypatch.setattr(models, "PAGE", tmp_path / "page.md")
    models.write([REFUSAL, models.row("llama", False, 1.0, 1024, (4,))])
    models.write([EXACT])
    assert json.loads(models.RESULTS.read_text()) == [EXACT, REFUSAL]
    assert "| llama | yes |" in models.PAGE.read_text()
