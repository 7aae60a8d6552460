"""The table of families: kept rows, and the page made of them."""

import json

import torch

from bench import models
from zoo.families import FAMILIES, REFUSED

EXACT = models.row("llama", True, 2.5e-6, 1024, (1, 2)) | {
    "bfloat16": models.rounded((1, 2), 1.014),
    "float16": models.rounded((1, 2), 2.5),
}
REFUSAL = models.row("bloom", refused="0 of 2 layers")


def test_the_page_shows_the_rows_that_are_kept():
    rows = json.loads(models.RESULTS.read_text())
    assert models.PAGE.read_text() == models.page(rows)
    assert [row["family"] for row in rows] == [*FAMILIES, *REFUSED]
    assert {row["family"] for row in rows if row["exact"]} == set(FAMILIES)
    assert all(row["bfloat16"] and row["float16"] for row in rows if row["exact"])
    assert all(row["refused"] for row in rows if not row["exact"])


def test_a_row_is_a_line():
    overflows = models.row("phi3", False, 1.0, 512, (3,)) | {"float16": models.rounded((3,), failure="it overflows")}
    lines = models.page([EXACT, overflows, REFUSAL]).splitlines()
    assert "| llama | yes | 2.5e-06 | 1.01 | no: 2.50 | 1024 | 1, 2 |" in lines
    assert "| phi3 | no | 1.0e+00 | not run | no: it overflows | 512 | 3 |" in lines
    assert "| bloom | 0 of 2 layers |" in lines


def test_new_rows_take_the_place_of_old_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "RESULTS", tmp_path / "rows.json")
    monkeypatch.setattr(models, "PAGE", tmp_path / "page.md")
    models.write([REFUSAL, models.row("llama", False, 1.0, 1024, (4,))])
    models.write([EXACT])
    assert json.loads(models.RESULTS.read_text()) == [EXACT, REFUSAL]
    assert "| llama | yes |" in models.PAGE.read_text()


def test_what_was_found_in_one_type_stays_when_another_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "RESULTS", tmp_path / "rows.json")
    monkeypatch.setattr(models, "PAGE", tmp_path / "page.md")
    models.write([EXACT])
    better = models.rounded((1, 2, 3), 1.5)
    models.write([{"family": "llama", "float16": better}])
    assert json.loads(models.RESULTS.read_text()) == [EXACT | {"float16": better}]


async def test_a_type_in_which_the_plain_model_overflows_is_told(monkeypatch):
    golden = object()
    far = {"float32": torch.ones(2, 3), "float16": torch.tensor([[1.0, torch.inf, 0.0]])}
    monkeypatch.setattr(models, "plain_logits", lambda _, dtype="float32": far[dtype])
    found = await models.measure_rounding(golden, "float16", (1, 2))
    assert found == models.rounded((1, 2), failure="not finite, in the plain model either")
