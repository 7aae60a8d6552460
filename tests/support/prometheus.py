"""A separate Prometheus that scrapes one service every half second."""

import asyncio
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.tools import tool

START_SECONDS = 30.0
CONFIG = """
global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: longleaf
    static_configs: [{{targets: ["{target}"]}}]
"""


class Prometheus:
    """One that runs, at this address."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def get(self, path: str, **query: str) -> Any:
        """The data of an answer. Raises AssertionError with the error of the query."""
        return await asyncio.to_thread(self._get, f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}")

    @staticmethod
    def _get(url: str) -> Any:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{url}: {error.read().decode()}") from None

    async def query(self, expression: str) -> list[Any]:
        """The series that it gives now."""
        return (await self.get("query", query=expression))["result"]

    async def value(self, expression: str) -> float | None:
        """The value of the only series in the result."""
        found = await self.query(expression)
        return float(found[0]["value"][1]) if found else None

    async def comes(self, expression: str) -> list[Any]:
        """Waits until it gives something."""
        while True:
            if found := await self.query(expression):
                return found
            await asyncio.sleep(0.1)  # no notification exists


def written(folder: Path, rules: Path, url: str) -> Path:
    """Its configuration."""
    folder.mkdir()
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=rules, target=urllib.parse.urlsplit(url).netloc))
    return config


@asynccontextmanager
async def scraping(url: str, rules: Path, folder: Path) -> AsyncGenerator[Prometheus, None]:
    """Skips the test where there is no Prometheus."""
    program = tool("prometheus")
    config = written(folder, rules, url)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    data = folder / "data"
    options = (f"--config.file={config}", f"--storage.tsdb.path={data}", f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(program, *options, stdout=log, stderr=log)
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        async with asyncio.timeout(START_SECONDS):
            while True:
                assert process.returncode is None, (folder / "log").read_text()
                try:
                    await prometheus.comes("up == 1")
                    break
                except (OSError, AssertionError):
                    await asyncio.sleep(0.1)  # it is not listening yet
        yield prometheus
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
