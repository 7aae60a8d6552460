"""A terminal in which commands run against a service."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.service import FakeEngine, serving
from tests.support.terminal import ANSWER, Terminal


@pytest.fixture
async def terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Terminal]:
    engine = FakeEngine()
    engine.answer = ANSWER
    async with serving(engine, tmp_path / "model") as (_, address):
        yield Terminal(address, engine, capsys)


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text("Call me Ishmael. " * 10)
    return str(path)
