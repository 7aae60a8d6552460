"""The benchmark of sharded weights on GPUs, with small models on the CPU."""

import json

import pytest

from bench.gpu import weights
from bench.gpu.weights import FAMILIES, LARGE, SMALL

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


def rows_of(capsys, *arguments):
    """The rows of a successful run, by case."""
    assert weights.main([*arguments, "--tiny", "--json"]) == 0
    return {row["case"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_a_dry_run_lists_all_cases_with_predictions(capsys):
    rows = rows_of(capsys, "--dry-run", "--ranks", "4")
    assert list(rows) == [*(f"equal tokens, {family}" for family in FAMILIES), *(large.name for large in LARGE)]
    for large in LARGE:
        row = rows[large.name]
        assert row["ranks"] == 4
        assert 0 < row["predicted_step_ms_1_rows"] <= row["predicted_step_ms_8_rows"]
        assert row["predicted_chunk_ms"] > 0


def test_ranks_with_shares_generate_the_tokens_of_one_rank(capsys):
    [row] = rows_of(capsys, "--device", "cpu", "--only", "qwen3_moe").values()
    assert row["is_equal"]


def test_shares_have_the_predicted_bytes(capsys):
    [row] = rows_of(capsys, "--device", "cpu", "--ranks", "3", "--only", "memory").values()
    assert row["case"] == f"memory of shares, {SMALL.name}"
    assert row["held_bytes"] == row["share_bytes"]


def test_large_models_are_measured_beside_their_predictions(capsys):
    [row] = rows_of(capsys, "--device", "cpu", "--only", "experts").values()
    assert len(row["exchanges_us_1_rows"]) == 4
    assert row["exchanges_us_8_rows_bytes"] == [8 * size for size in row["exchanges_us_1_rows_bytes"]]
    assert row["step_ms_8_rows"] > 0
    assert row["chunk_ms_1_rows"] > 0
    assert {"predicted_step_ms_8_rows", "predicted_chunk_ms"} <= set(row)


def test_a_failed_case_is_reported_and_the_others_continue(capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("no ranks")

    monkeypatch.setattr(weights, "measure_large", fail)
    assert weights.main(["--device", "cpu", "--tiny", "--json", "--only", "shape of"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert ["failed" in row for row in rows] == [False, True, True]
