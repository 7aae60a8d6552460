"""The pages in bench/results, made of what is kept there."""

import json

from bench import report, tree_page
from bench.gpu.__main__ import read as gpu_rows
from bench.gpu.table import page as gpu_page
from bench.harness.arguments import RESULTS

ROWS = json.loads((RESULTS / "scaling.json").read_text())


def test_the_pages_show_the_rows_that_are_kept():
    assert (RESULTS / "README.md").read_text() == report.page(report.kept())
    assert (RESULTS / "tree.md").read_text() == tree_page.page(RESULTS)
    assert (RESULTS / "gpu.md").read_text() == gpu_page(gpu_rows(RESULTS / "gpu.json"))


def test_what_was_not_measured_is_left_out():
    headings = [line for line in report.page({"scaling": ROWS}).splitlines() if line.startswith("#")]
    assert headings == ["# Results", "## scaling"]


def test_each_machine_is_told_once():
    older = {**ROWS[0], "machine": {**ROWS[0]["machine"], "date": "2020-01-01"}}
    lines = [line for line in report.page({"scaling": [*ROWS, older]}).splitlines() if line.startswith("- ")]
    assert [line.endswith("2020-01-01") for line in lines] == [True, False]
