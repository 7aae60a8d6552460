"""Streams through a gateway: status events during waits, and slow readers."""

from functools import partial
from typing import Any

import httpx2
import pytest

from coordinator import engine_messages
from gateway import generations
from gateway.contexts import upload
from gateway.sse import EventResponse
from longleaf.types import Progress
from tests.support.service import TEXT, Served, ids

QUESTION = {"model": "fake", "messages": [{"role": "user", "content": "Who?"}], "stream": True}
PLAIN = {"content-type": "text/plain"}


async def until(lines: Any, line: str) -> None:
    async for found in lines:
        if found == line:
            return
    raise AssertionError(f"{line} was not received")


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (engine_messages.Admitted(9, 0, queue_position=3), ": queued 3"),
        (Progress(4096, 60_000), ": read 4096 of 60000 tokens"),
    ],
    ids=["waits", "reads"],
)
async def test_queued_answer_reports_the_reason(
    service: Served, url: str, happens: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "EventResponse", partial(EventResponse, heartbeat=0.01))
    service.engine.script, service.engine.is_endless = (happens,), True
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for path, body in (("chat/completions", QUESTION), ("completions", {"prompt": "Who?", "stream": True})):
            async with client.stream("POST", f"/v1/{path}", json={"model": "fake", **body}) as stream:
                await until(aiter(stream.aiter_lines()), message)


async def test_ingest_reports_its_progress(service: Served, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "EventResponse", partial(EventResponse, heartbeat=0.01))
    service.engine.is_endless = True
    async with (
        httpx2.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/contexts/book", content=TEXT.encode(), headers=PLAIN) as stream,
    ):
        num_tokens = len(ids(TEXT)) + 2
        lines = aiter(stream.aiter_lines())
        await until(lines, f": prefilling, {num_tokens} of {num_tokens} tokens")
