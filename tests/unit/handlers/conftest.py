"""Fixtures for generations that are resumed from a journal."""

from pathlib import Path

import pytest

from coordinator.text.tokenizer import Tokenizer
from tests.support.successors import tokenizer_of


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tokenizer_of(tmp_path / "model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"
