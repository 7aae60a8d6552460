"""A terminal in which commands run against a service."""

import asyncio
import json
from typing import Any

import pytest

from longleaf.cli import app
from tests.support.service import FakeEngine, byte_tokenizer

ANSWER = tuple((i,) for i in byte_tokenizer().encode("Grüße").ids)


class Terminal:
    """Runs commands against a service."""

    def __init__(self, address: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
        self.address, self.engine, self._capsys = address, engine, capsys

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(self._run, [*arguments, "--server", self.address])

    async def plain(self, *arguments: str) -> tuple[int, str, str]:
        """A command that needs no service."""
        return await asyncio.to_thread(self._run, [*arguments])

    def _run(self, arguments: list[str]) -> tuple[int, str, str]:
        try:
            app.main(arguments)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = self._capsys.readouterr()
        return code, out, err

    async def json(self, *arguments: str) -> list[Any]:
        code, out, err = await self.run(*arguments, "--json")
        assert (code, err) == (0, "")
        return [json.loads(line) for line in out.splitlines()]
