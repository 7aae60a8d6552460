"""A checkpoint is copied from storage completely and verified, or not created."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from longleaf.cli.models import app
from longleaf.config import embedded_model
from longleaf.errors import InvalidArgument, LongleafError
from longleaf.fingerprint import read_fingerprint

SOURCE = embedded_model()


def fetch(url: str, folder: Path, *options: str):
    return CliRunner().invoke(app, ["fetch", url, str(folder), *options], catch_exceptions=True)


@pytest.mark.parametrize("ending", ["", "/"])
def test_folder_is_copied_completely_and_once(tmp_path, ending):
    digest = read_fingerprint(SOURCE).digest
    found = fetch(f"file://{SOURCE}{ending}", tmp_path / "model", f"--fingerprint={digest}")
    assert found.exit_code == 0 and digest in found.output
    assert read_fingerprint(tmp_path / "model").digest == digest
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    again = fetch("file:///nowhere", tmp_path / "model", f"--fingerprint={digest}")
    assert again.exit_code == 0 and "exists" in again.output


def test_wrong_fingerprint_is_refused_and_no_folder_is_created(tmp_path):
    found = fetch(f"file://{SOURCE}", tmp_path / "model", "--fingerprint=0123")
    assert isinstance(found.exception, InvalidArgument) and "not 0123" in str(found.exception)
    assert not (tmp_path / "model").exists()


def test_files_of_an_interrupted_copy_are_discarded(tmp_path):
    (tmp_path / ".model.longleaf-partial").mkdir()
    (tmp_path / ".model.longleaf-partial" / "model.safetensors.index.json").write_text("{")
    assert fetch(f"file://{SOURCE}", tmp_path / "model", "--fingerprint=").exit_code == 0
    assert not (tmp_path / "model" / "model.safetensors.index.json").exists()


def test_folder_that_the_user_made_beside_the_copy_is_not_touched(tmp_path):
    (tmp_path / "model.partial").mkdir()
    assert fetch(f"file://{SOURCE}", tmp_path / "model", "--fingerprint=").exit_code == 0
    assert (tmp_path / "model.partial").is_dir()


@pytest.mark.parametrize("url", ["file:///nowhere/model", "no-such-storage://model"])
def test_unreadable_storage_is_a_one_line_error(tmp_path, url):
    found = fetch(url, tmp_path / "model")
    assert isinstance(found.exception, LongleafError) and "\n" not in str(found.exception)
    assert not (tmp_path / "model").exists()
