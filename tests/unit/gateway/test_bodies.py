"""JSON bodies as they arrive: the shared memory limit of all callers, and the timeout of one body."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from gateway import bodies
from gateway.bodies import BodyReader
from gateway.errors import HttpProblem

MOST = 100
GOOD = b'{"a": 1}'


class FakeClient:
    """A caller whose body arrives as the test dictates."""

    def __init__(self, declared: int | None = None) -> None:
        self._messages = asyncio.Queue[dict[str, Any]]()
        self.num_requests = 0
        self.requested = asyncio.Semaphore(0)
        headers = [] if declared is None else [(b"content-length", str(declared).encode())]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        self.request = Request(scope, self._receive)

    async def _receive(self) -> dict[str, Any]:
        self.num_requests += 1
        self.requested.release()
        return await self._messages.get()

    def send(self, body: bytes, more: bool = False) -> "FakeClient":
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": more})
        return self

    def leave(self) -> "FakeClient":
        self._messages.put_nowait({"type": "http.disconnect"})
        return self


def problem(caught: pytest.ExceptionInfo[HttpProblem]) -> tuple[int, str | None, str, str | None]:
    error = caught.value
    return error.status, error.code, error.kind, error.headers.get("retry-after")


FULL = (503, "gateway_busy", "server_error", "1")


@pytest.mark.parametrize(
    ("client", "status"),
    [
        (lambda: FakeClient(len(GOOD)).send(GOOD), 200),
        (lambda: FakeClient().send(GOOD[:3], more=True).send(GOOD[3:]), 200),
        (lambda: FakeClient(bodies.MAX_JSON_BYTES + 1), 413),
        (lambda: FakeClient().send(b" " * (bodies.MAX_JSON_BYTES + 1)), 413),
        (lambda: FakeClient(MOST + 1), 503),
        (lambda: FakeClient().send(b" " * MOST, more=True).send(b" "), 503),
        (lambda: FakeClient(50).send(b" " * 10, more=True), 408),
        (lambda: FakeClient(50).send(b" " * 10, more=True).leave(), 400),
        (lambda: FakeClient(1).send(b"{"), 400),
        (lambda: FakeClient(2).send(b"[]"), 400),
        (lambda: FakeClient(1).send(b"\xff"), 400),
    ],
    ids="whole chunked declared-large large declared-full full idle left broken list no-text".split(),
)
async def test_memory_is_released_however_a_body_ends(client, status):
    most = 2 * bodies.MAX_JSON_BYTES if status == 413 else MOST
    reader = BodyReader(most, part_seconds=0.05)
    reading = asyncio.ensure_future(reader.read_json(client().request))
    await asyncio.wait([reading])
    error = reading.exception()
    assert (error.status if isinstance(error, HttpProblem) else 200) == status
    reader.audit()


async def test_memory_is_released_if_the_reader_is_cancelled():
    reader, client = BodyReader(MOST), FakeClient(50)
    reading = asyncio.create_task(reader.read_json(client.request))
    await client.requested.acquire()
    reading.cancel()
    await asyncio.wait([reading])
    reader.audit()


async def test_body_over_the_limit_is_refused_before_it_is_read():
    reader, first, second = BodyReader(MOST), FakeClient(60), FakeClient(60)
    reading = asyncio.create_task(reader.read_json(first.request))
    await first.requested.acquire()
    with pytest.raises(HttpProblem) as caught:
        await reader.read_json(second.send(GOOD).request)
    assert problem(caught) == FULL and second.num_requests == 0
    assert await reader.read_json(FakeClient(len(GOOD)).send(GOOD).request) == {"a": 1}  # less than that is free
    first.send(GOOD)
    assert await reading == {"a": 1}
    assert await reader.read_json(FakeClient(60).send(GOOD).request) == {"a": 1}
    reader.audit()


async def test_bodies_without_a_length_are_counted_as_they_arrive():
    reader, first, second = BodyReader(MOST), FakeClient(), FakeClient()
    reading = asyncio.create_task(reader.read_json(first.send(b" " * 90, more=True).request))
    for _ in range(2):  # the first part has been read
        await first.requested.acquire()
    with pytest.raises(HttpProblem) as caught:
        await reader.read_json(second.send(b" " * 11, more=True).request)
    assert problem(caught) == FULL
    first.send(GOOD)
    assert await reading == {"a": 1}
    reader.audit()


async def test_memory_is_reserved_until_a_body_is_decoded(monkeypatch):
    large = b" " * bodies.LARGE_BYTES + GOOD
    reader, may_end, begun = BodyReader(2 * len(large) - 1), asyncio.Event(), asyncio.Event()
    loop, decode = asyncio.get_running_loop(), bodies.decode

    def decoded(content):
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result()
        return decode(content)

    monkeypatch.setattr(bodies, "decode", decoded)
    reading = asyncio.create_task(reader.read_json(FakeClient(len(large)).send(large).request))
    await begun.wait()
    with pytest.raises(HttpProblem) as caught:
        await reader.read_json(FakeClient(len(large)).request)
    assert problem(caught) == FULL
    may_end.set()
    assert await reading == {"a": 1}
    reader.audit()


async def test_slow_body_times_out():
    reader, client = BodyReader(MOST, part_seconds=3600, seconds=0.05), FakeClient()
    reading = asyncio.create_task(reader.read_json(client.request))
    while not reading.done():  # each part is in time
        client.send(b"", more=True)
        await asyncio.sleep(0.001)
    with pytest.raises(HttpProblem) as caught:
        await reading
    assert caught.value.status == 408 and caught.value.headers["connection"] == "close"
    reader.audit()
